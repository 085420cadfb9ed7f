"""Entries of a checkpoint as one rank has them, and how each moves to another number of ranks."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from weft.specs import Mesh
from weft.training.checkpoint.cut import Cut, HeldPart, whole_cut

__all__ = ["ALONE", "CODEC", "Entry", "Kind", "Ranks", "Snapshot", "mean_of", "move", "subject_of"]

CODEC = "codec/"
"""Before what a codec keeps: `codec/residual/w` is what it has not sent of the gradient of w."""

Kind = Literal["global", "sum", "mean", "own"]
"""How a tensor lies across ranks:

global   one tensor: every rank has the same, or a part of it
sum      every replica has a tensor, of which only the sum matters (residuals of compression)
mean     every replica has a tensor, all of which stand for their mean (running statistics, weights of relaxed ranks)
own      every replica has a tensor with no meaning elsewhere (random state)

The ranks of a replica have the same tensor too, or parts of it.
"""


@dataclass(frozen=True)
class Entry:
    """A named tensor as one rank has it.

    Args:
        cut: the part that `tensor` is, or several parts, of the one tensor of all ranks or of a replica's own, whose
            ranks have the other parts; None if it is all of it.
        replica: whose it is, if not global; None for that of the mesh of those who save.
    """

    tensor: Tensor
    kind: Kind = "global"
    cut: Cut | None = None
    replica: int | None = None

    def __post_init__(self) -> None:
        assert self.cut is None or tuple(self.tensor.shape) == self.cut.held_shape, "the tensor is the part"

    @staticmethod
    def of_part(tensor: Tensor, kind: Kind, cut: Cut | None, replica: int | None = None) -> "Entry":
        """The whole all the same where a tensor is a number about a parameter, such as torch.optim's count of steps."""
        is_part = cut is not None and tuple(tensor.shape) == cut.held_shape
        return Entry(tensor, kind, cut if is_part else None, replica)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        return tuple(self.tensor.shape) if self.cut is None else self.cut.shape

    @property
    def parts(self) -> tuple[HeldPart, ...]:
        """Of the whole, in this tensor; none where it is empty."""
        return (self.cut or whole_cut(self.shape)).parts


@dataclass(frozen=True)
class Snapshot:
    """Everything that one rank needs to go on: tensors by name, and progress that JSON can hold.

    Args:
        unfit: the entries that were saved, but nothing for this rank among them: there it begins afresh.
    """

    step: int
    entries: Mapping[str, Entry]
    progress: dict[str, Any] = field(default_factory=dict)
    unfit: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Ranks:
    """Those who save and load together, as one of them sees them; one that is alone unless told otherwise.

    Args:
        mesh: where this rank stands; a tensor of kind sum, mean or own goes by its replica.
        gather: every rank's tensor, in the order of ranks, on every rank. Ranks that do not meet get their own back,
            and then rank 0 is the one that writes.
        cut_of: the part that this rank holds of an entry; None for all of it.
        consistency: how ranks come together that each save weights of their own; None where all hold the same.
        elsewhere: parameters and buffers of which others hold parts and this rank none, by their entries: a stage of a
            pipeline reads nothing of the others.
    """

    mesh: Mesh = Mesh()  # noqa: RUF009 -- frozen
    gather: Callable[[Tensor], tuple[Tensor, ...]] = lambda tensor: (tensor,)
    cut_of: Callable[[str], Cut | None] = lambda name: None
    consistency: str | None = None
    elsewhere: frozenset[str] = frozenset()

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks."""
        text = json.dumps(value).encode()
        lengths = [int(length) for length in self.gather(torch.tensor(len(text)))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        texts = zip(self.gather(padded), lengths, strict=True)
        return [json.loads(found[:length].numpy().tobytes()) for found, length in texts]


ALONE = Ranks()


def move(kind: Kind, num_saved: int, rank: int, size: int, read: Callable[[int], Tensor]) -> Tensor | None:
    """The tensor of `rank` among `size`, where `num_saved` ranks saved one each (a global one counts as one).

    None means that nothing saved fits this rank (a new rank's own state): it starts afresh.

    Args:
        read: the tensor that a rank saved; called for those alone that are needed.
    """
    if kind == "global":
        return read(0)
    if num_saved == size:
        return read(rank)
    if kind == "sum":
        return torch.stack([read(i) for i in range(num_saved)]).sum(0) / size
    if kind == "mean":
        return mean_of([read(i) for i in range(num_saved)])
    return read(rank) if rank < num_saved else None


def subject_of(name: str) -> str:
    """The entry of the parameter, or buffer, that an entry is about; itself if that is none.

    >>> subject_of("slot/layer.weight/velocity"), subject_of("codec/residual/layer.weight"), subject_of("random")
    ('parameter/layer.weight', 'parameter/layer.weight', 'random')
    """
    if name.startswith("slot/"):
        return f"parameter/{name.removeprefix('slot/').rpartition('/')[0]}"
    _, _, parameter = name.removeprefix(CODEC).partition("/")
    return f"parameter/{parameter}" if name.startswith(CODEC) and parameter else name


def mean_of(tensors: Sequence[Tensor]) -> Tensor:
    """The mean of the tensors of several ranks; counters are the same on all of them."""
    return torch.stack(list(tensors)).mean(0) if tensors[0].is_floating_point() else tensors[0]
