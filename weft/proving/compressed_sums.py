"""The sums that ranks of a plan receive, of named tensors that a lossy compression sends.

total = sum_r q_r(kept_r + w_r g_r)        kept_r stays with rank r; the sum is made in the order of ranks
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import final

import torch
from torch import Tensor

from weft.errors import UsageError
from weft.proving.compression import (
    AbstractCompression,
    HalfSender,
    Message,
    OfSenders,
    Range,
    Setting,
    messages_of_gradients,
    messages_of_weights,
)
from weft.proving.rounding import Rounding
from weft.specs import Plan
from weft.specs.loading import load
from weft.specs.plan import Choice, value_of

__all__ = ["CompressedSum", "check_compressed", "compression_error", "is_lossy", "sum_of_gradients", "sum_of_weights"]


IN_RANK_ORDER = ("auto", "gather", "split", "dense")
"""Sparse sums whose bits are those of the sum that is made in the order of ranks."""


@final
class CompressedSum:
    """Of tensors like these, step after step.

    Args:
        messages: the elements that travel together.
        like: tensors by name.
    """

    def __init__(
        self, compression: AbstractCompression, messages: Sequence[Message], like: Mapping[str, Tensor]
    ) -> None:
        self._compression = compression
        self._messages = messages
        self._like = {name: tensor.detach() for name, tensor in like.items()}

    @torch.no_grad()
    def __call__(
        self, tensors: Sequence[Mapping[str, Tensor | None]], weights: Sequence[float]
    ) -> dict[str, Tensor | None]:
        """None of a tensor that no rank has, though zeros were sent for it."""
        totals = {own.name: torch.zeros(own.shape, dtype=self._like[own.name].dtype) for own in self._ranges()}
        for message in self._messages:
            values = [message.take(own, self._like) for own in tensors]
            message.put(self._compression.add_up(message, values, weights), totals)
        is_there = {name: any(own.get(name) is not None for own in tensors) for name in totals}
        return {name: total if is_there[name] else None for name, total in totals.items()}

    def _ranges(self) -> list[Range]:
        return [own for message in self._messages for own in message.ranges]


def is_lossy(plan: Plan) -> bool:
    """Whether the messages of ranks hang on more than the numbers that are sent: on chance, or on what was kept."""
    if plan.num_ranks == 1:
        return False
    found = load(value_of("compress", plan.compress).equations[plan.channel])
    return not isinstance(found, Rounding) or plan.compress.get("round", "nearest") == "stochastic"


def check_compressed(plan: Plan) -> None:
    """Refuse to prove a lossy compression whose equations are not known here.

    Raises:
        UsageError: of ranks that are no group, or of which each has a part of the model.
    """
    if not is_lossy(plan):
        return
    if value_of("compress", plan.compress).coding.needs_group:
        raise UsageError(
            f"which messages are compressed hangs on a measured link (plan: {plan}); prove compress=topk, and none"
        )
    given = _with_defaults(plan.compress)
    if given.get("sum", "auto") not in IN_RANK_ORDER or (given.get("sum", "") and given["bits"]):
        raise UsageError(
            f"sums in another order than that of ranks, or in codes, have no reference (plan: {plan}); prove sum=gather"
        )
    is_in_sums = value_of("consistency", plan.consistency).traits.has_all_reduce and plan.channel == "all_reduce"
    # The outer step of a reference may differ in its last bit, and then another number is the largest.
    is_local = plan.consistency.get("outer", "none") == "none" and plan.shard == 1
    is_known = is_in_sums and (plan.is_synchronous or is_local)
    if not is_known or plan.is_streamed or plan.splits_parameters:
        raise UsageError(
            "a compression that draws, or keeps numbers back, is proved of ranks in a group that hold the whole model, "
            f"synchronous, or local without an outer optimizer (plan: {plan}); prove it with data=N, and this plan "
            "with compress=bf16"
        )


def compression_error(plan: Plan) -> float:
    """How far ranks may be off, as a share of a tensor's largest value, where a definition does not tell every bit."""
    return _make(plan).tolerance if is_lossy(plan) else 0.0


def sum_of_gradients(plan: Plan, parameters: Mapping[str, Tensor], momentum: tuple[float, bool]) -> CompressedSum:
    """Of the ranks of a synchronous plan.

    Args:
        momentum: of the optimizer, and whether it is Nesterov's, of a compression that takes it.
    """
    is_dense = _rounding_of(plan) is not None
    messages = messages_of_gradients(parameters, 1 if is_dense else plan.shard)
    return CompressedSum(_make(plan, *momentum), messages, parameters)


def sum_of_weights(plan: Plan, parameters: Mapping[str, Tensor]) -> CompressedSum:
    """Of differences of weights."""
    return CompressedSum(_make(plan), messages_of_weights(parameters), parameters)


def _rounding_of(plan: Plan) -> Rounding | None:
    found = load(value_of("compress", plan.compress).equations[plan.channel])
    return found if isinstance(found, Rounding) else None


def _with_defaults(choice: Choice) -> Choice:
    parameters = {**value_of("compress", choice).parameters, **dict(choice.parameters)}
    return replace(choice, parameters=tuple(parameters.items()))


def _make(plan: Plan, momentum: float = 0.0, is_nesterov: bool = False) -> AbstractCompression:
    row, num_ranks = value_of("compress", plan.compress), plan.num_replicas
    choice = _with_defaults(plan.compress)
    group_size = plan.shard if plan.shard > 1 else num_ranks
    setting = Setting(choice, num_ranks, group_size, momentum, is_nesterov)
    rounding = _rounding_of(plan)
    if rounding is not None:
        return OfSenders(setting, partial(HalfSender, rounding=rounding))
    make: Callable[[Setting], AbstractCompression] = load(row.equations[plan.channel])
    return make(setting)
