"""`torch.nn.utils.clip_grad_norm_` of gradients that lie in parts: by the norm of the whole, as one process has it.

    rank 0   norms of its parts   --.
                                    +--> the placement adds up squares, each once --> one norm, on all ranks
    rank 1   norms of its parts   --'

The function that computes the norm is replaced inside of torch, once, so that it does not matter where a script has
imported its clipping from. Gradients of which no part is elsewhere are left to torch.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from weft.distributed.script.weaving.weaving import Weaving, weavings_of
from weft.distributed.script.world.world import find_world
from weft.errors import UsageError

__all__ = ["clip_by_whole_norm"]


def clip_by_whole_norm() -> None:
    """From now on. A second time it does nothing."""
    private: Any = clip_grad
    if not hasattr(private._get_total_norm, "__weft__"):
        private._get_total_norm = torch.nn.utils.get_total_norm = _guard(private._get_total_norm)


def _guard(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(right)
    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        found = _find(given)
        if found is None:
            return right(given, norm_type, error_if_nonfinite, foreach)
        total = _norm_of(*found, float(norm_type))
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(f"total norm of gradients is not finite (norm: {total.item()}); see clip_grad_norm_")
        return total

    total_norm.__weft__ = True  # type: ignore[attr-defined]
    return total_norm


def _find(given: Sequence[Tensor]) -> tuple[Weaving, dict[str, Tensor]] | None:
    """The weaving whose gradients these are, by name, if some of them lie in parts."""
    wanted = {id(tensor) for tensor in given}
    for weaving in weavings_of(find_world()):
        if weaving.replicas is None or not weaving.plan.is_synchronous:
            continue
        placement = weaving.replicas.placement
        own = {name: p.grad for name, p in weaving.parameters.items() if p.grad is not None and id(p.grad) in wanted}
        is_cut = weaving.plan.pipeline > 1 or any(placement.cut_of(f"parameter/{n}") for n in weaving.parameters)
        if own and is_cut:
            if len(own) < len(given):
                raise UsageError(
                    f"norm is asked for of gradients of several models, of which one lies in parts "
                    f"(plan: {weaving.plan}); clip those of each model by themselves"
                )
            return weaving, own
    return None


def _norm_of(weaving: Weaving, gradients: Mapping[str, Tensor], order: float) -> Tensor:
    """|g| of order p: squares of the numbers |g_i|^(p/2) are what a placement adds up."""
    if not 0 < order < math.inf:
        raise UsageError(
            f"norm of this order is not one of sums, which gradients in parts need (norm_type: {order}, "
            f"plan: {weaving.plan}); use norm_type=2"
        )
    assert weaving.replicas is not None, "gradients lie in parts on several ranks"
    norms = {name: torch.linalg.vector_norm(g.detach(), order) for name, g in gradients.items()}
    add_up = weaving.replicas.placement.norm
    with weaving.world.waiting("clip_grad_norm_", weaving.world.group):
        if order == 2.0:
            return add_up(norms)
        return add_up({name: norm ** (order / 2) for name, norm in norms.items()}) ** (2 / order)
