"""From a batch to the gradients of an update: micro-batches, the point they are taken at, clipping."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from weft.graph import AbstractExecutor, GradientSink, State
from weft.specs import Batch
from weft.training.weighting import Weighting

__all__ = ["Gradients", "Norm", "clip_by_norm", "clip_factor", "gradients_of", "joint_norm", "use_point"]

Gradients = Mapping[str, Tensor | None]

Norm = Callable[[Mapping[str, Tensor]], Tensor]
"""The L2 norm of gradients with these L2 norms, by name, a scalar; of those on other ranks too, where they lie in
pieces."""


def gradients_of(
    executor: AbstractExecutor,
    state: State,
    batch: Batch,
    num_pieces: int,
    on_gradient: GradientSink,
    weighting: Weighting | None = None,
    *,
    keeps_empty: bool = False,
) -> tuple[float, State]:
    """The mean loss of a batch, computed in micro-batches that weigh by their targets; gradients go to the sink.

    The sink gets each gradient during the last micro-batch's backward, as soon as it is complete.

    Args:
        weighting: where samples of several ranks meet: gradients come with their weights.
        keeps_empty: micro-batches without samples are computed all the same, as ranks take every forward together.
    """
    pieces = batch.split(num_pieces, keeps_empty=keeps_empty) if num_pieces > 1 else [batch]
    total = max(1, batch.num_targets)
    weights = [piece.num_targets / total for piece in pieces] if num_pieces > 1 else [1.0]
    loss, sums = 0.0, dict[str, Tensor | None]()
    for i, (piece, weight) in enumerate(zip(pieces, weights, strict=True)):
        left = weight
        if weighting is not None:
            weighting.piece, left = weight, 1.0
        sink = _accumulate(sums, left, on_gradient if i == len(pieces) - 1 else None)
        if len(piece):
            outputs, state = executor(state, piece, sink)
            loss += weight * outputs.loss.item()
        else:
            state = _without_samples(executor, state, piece, sink if weighting is not None else _nothing(sink))
    return loss, state


def _without_samples(executor: AbstractExecutor, state: State, batch: Batch, on_gradient: GradientSink) -> State:
    """Take part in the others' step. The mean over no samples is no number, and no statistic of one."""
    before = {name: buffer.clone() for name, buffer in state.buffers.items()}
    _, state = executor(state, batch, on_gradient)
    for name, buffer in state.buffers.items():
        buffer.copy_(before[name])
    return state


def _nothing(on_gradient: GradientSink) -> GradientSink:
    """For gradients of no samples, which are no numbers."""
    return lambda name, gradient: on_gradient(name, None)


def _accumulate(sums: dict[str, Tensor | None], weight: float, on_complete: GradientSink | None) -> GradientSink:
    """A sink that adds weighted gradients to `sums`, or, in the last round, hands each sum over."""

    def add(name: str, gradient: Tensor | None) -> None:
        before = sums.pop(name, None)
        if gradient is not None and weight != 1.0:
            gradient.mul_(weight)
        total = gradient if before is None else before if gradient is None else before.add_(gradient)
        if on_complete is None:
            sums[name] = total
        else:
            on_complete(name, total)

    return add


def joint_norm(norms: Mapping[str, Tensor]) -> Tensor:
    """The L2 norm of gradients that are all here.

    >>> joint_norm({"w": torch.tensor(3.0), "b": torch.tensor(4.0)})
    tensor(5.)
    """
    return torch.linalg.vector_norm(torch.stack(list(norms.values()))) if norms else torch.zeros(())


def clip_by_norm(gradients: Gradients, limit: float, norm: Norm = joint_norm) -> Gradients:
    """Scale all gradients by one factor so that their joint L2 norm is at most `limit`; the bits of
    `torch.nn.utils.clip_grad_norm_`."""
    norms = {name: torch.linalg.vector_norm(g) for name, g in gradients.items() if g is not None}
    factor = clip_factor(norms, limit, norm)
    return {name: None if gradient is None else gradient * factor for name, gradient in gradients.items()}


def clip_factor(norms: Mapping[str, Tensor], limit: float, norm: Norm = joint_norm) -> Tensor:
    """The factor that brings the joint norm of gradients with these L2 norms down to `limit`."""
    factor: Tensor = limit / (norm(norms) + 1e-6)
    return factor.clamp(max=1.0)


@contextmanager
def use_point(parameters: Mapping[str, Tensor], point: Mapping[str, Tensor]) -> Iterator[None]:
    """Hold other values in the parameters while a gradient is taken there (an optimizer that looks ahead)."""
    if point is parameters:
        yield
        return
    home = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    _write(parameters, point)
    try:
        yield
    finally:
        _write(parameters, home)


@torch.no_grad()
def _write(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(values[name])
