"""How a tensor of a checkpoint lies across ranks, and how it moves to another number of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from weft.errors import CorruptFileError

__all__ = ["AVERAGED", "PER_RANK", "REPLICATED", "SUMMED", "Layout", "mean_of", "part_for", "sharded"]


@dataclass(frozen=True)
class Layout:
    """One of five:

    replicated   every rank has the same tensor; one part is kept
    sharded      rank r has the r-th piece along `dim`
    summed       ranks have different tensors of which only the sum matters (residuals of compression)
    averaged     ranks have different tensors that stand for their mean (weights of replicas that meet seldom)
    per_rank     ranks have different tensors with no meaning elsewhere (random state)
    """

    kind: Literal["replicated", "sharded", "summed", "averaged", "per_rank"]
    dim: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "dim": self.dim} if self.kind == "sharded" else {"kind": self.kind}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "Layout":
        if data.get("kind") not in ("replicated", "sharded", "summed", "averaged", "per_rank"):
            raise CorruptFileError(f"unknown layout in a checkpoint ({data}); it was written by a newer version")
        return Layout(data["kind"], data.get("dim", 0))


REPLICATED = Layout("replicated")
SUMMED = Layout("summed")
AVERAGED = Layout("averaged")
PER_RANK = Layout("per_rank")


def sharded(dim: int) -> Layout:
    return Layout("sharded", dim)


def part_for(layout: Layout, parts: Sequence[Tensor], rank: int, world_size: int) -> Tensor | None:
    """The part of `rank` among `world_size`, of a tensor that was saved as `parts`, one per rank that saved it.

    None means that nothing saved fits this rank (a new rank's own state): it starts afresh.
    """
    if layout.kind == "replicated":
        return parts[0]
    if len(parts) == world_size:
        return parts[rank]
    if layout.kind == "sharded":
        return torch.cat(list(parts), layout.dim).tensor_split(world_size, layout.dim)[rank].contiguous()
    if layout.kind == "summed":
        return torch.stack(list(parts)).sum(0) / world_size
    if layout.kind == "averaged":
        return mean_of(parts)
    return parts[rank] if rank < len(parts) else None


def mean_of(parts: Sequence[Tensor]) -> Tensor:
    """The mean of the tensors of several ranks; counters are the same on all of them."""
    return torch.stack(list(parts)).mean(0) if parts[0].is_floating_point() else parts[0]
