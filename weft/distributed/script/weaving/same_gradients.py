"""Gradients that a script has put into `grad` by itself, and that ranks would drift apart by, were they not the same.

loss.backward()                         exchanged: nothing to be seen to
p.grad = torch.autograd.grad(...)       of this rank's share alone: refused
p.grad = weft.mean(gradient)            the same on all ranks, as are zeros, and those of the step before
"""

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from weft.distributed.group.dense import as_bytes
from weft.distributed.script.world.world import World
from weft.errors import UsageError

__all__ = ["check_same_gradients"]


def check_same_gradients(world: World, gradients: Mapping[str, Tensor]) -> None:
    """A collective call where there are any: ranks compare them.

    Raises:
        UsageError: on all ranks, if one has another gradient than rank 0.
    """
    if not gradients:
        return
    names = list(gradients)
    facts = {"gradients that no backward has exchanged": ", ".join(names)}
    with world.meeting("optimizer.step", facts, same_line=False):
        digests = torch.empty(world.replicas.size, len(names), dtype=torch.int64)
        world.replicas.all_gather(digests, torch.tensor([[_digest(gradients[name]) for name in names]]))
    differing = (digests != digests[0]).any(0).tolist()
    if any(differing):
        name = names[differing.index(True)]
        raise UsageError(
            f"gradient does not come from backward, and ranks would drift apart by it ({name}); "
            "use loss.backward(), or p.grad = weft.mean(gradient, weight=len(x))"
        )


def _digest(gradient: Tensor) -> int:
    return zlib.crc32(as_bytes(gradient.detach().to_dense().cpu().contiguous()).numpy().tobytes())
