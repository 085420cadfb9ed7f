"""The step of one rank as one graph: what an executor and an optimizer do, in one program."""

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from weft.graph import AbstractExecutor, GraphExecutor, State, UpdateFunction, WholeStep
from weft.specs import Batch
from weft.training.gradients import clip_by_norm
from weft.training.optimizers import AbstractOptimizer, AbstractRule, Optimizer, OptimizerState, Shared

__all__ = ["StepInOne", "step_in_one", "update_of"]


@final
class StepInOne:
    """A forward, backward and update in one program; a loss that is not finite changes no parameter."""

    def __init__(self, executor: AbstractExecutor, optimizer: AbstractOptimizer, whole: WholeStep) -> None:
        self._parts = executor, optimizer
        self._whole = whole
        # The optimizer's state as it was returned last, and the form in which the program knows it.
        self._state: OptimizerState | None = None
        self._memory: Any = None

    def stands_for(self, executor: AbstractExecutor, optimizer: AbstractOptimizer) -> bool:
        """Whether it does what these would do: one that was wrapped, to record or to charge time, does more."""
        return self._parts[0] is executor and self._parts[1] is optimizer

    def __call__(
        self, model: State, optimizer: OptimizerState, batch: Batch, lr: float
    ) -> tuple[float, State, OptimizerState]:
        """The loss, and what follows model and optimizer state, which are consumed."""
        if optimizer is not self._state:
            self._memory = {"step": optimizer.shared.step, "slots": optimizer.slots}
        rate = torch.tensor(lr, dtype=torch.float64)
        outputs, model, self._memory = self._whole(model, self._memory, batch, {"lr": rate})
        self._state = OptimizerState(Shared(rate, self._memory["step"]), self._memory["slots"])
        return outputs.loss.item(), model, self._state


def step_in_one(
    executor: AbstractExecutor, optimizer: AbstractOptimizer, model: State, clip_norm: float | None
) -> StepInOne | None:
    """The step with its update in the graph, to the same bits; None where it must be two.

    It must be where the executor does not compile, where torch.optim keeps its state to itself, and where a rule looks
    ahead: its gradient is taken elsewhere than at the parameters.
    """
    if not isinstance(executor, GraphExecutor) or not isinstance(optimizer, Optimizer):
        return None
    if optimizer.prepare(model.parameters, optimizer.init(model.parameters)) is not model.parameters:
        return None
    whole = executor.whole_step(update_of(optimizer.rule, clip_norm))
    return None if whole is None else StepInOne(executor, optimizer, whole)


def update_of(rule: AbstractRule, clip_norm: float | None) -> UpdateFunction:
    """A rule over all parameters as a pure function; memory is `{"step", "slots"}`, settings are `{"lr"}`."""

    def update(
        gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor], memory: Any, settings: Any
    ) -> tuple[Mapping[str, Tensor], Any]:
        if clip_norm is not None:
            in_order = {name: gradients[name] for name in parameters if name in gradients}
            gradients = clip_by_norm(in_order, clip_norm)  # type: ignore[assignment]  # None comes of None only
        shared = rule.new_input(Shared(lr=settings["lr"], step=memory["step"]))
        found, slots = {}, dict(memory["slots"])
        for name, parameter in parameters.items():
            if name in gradients:
                found[name], slots[name] = rule.update_rule(gradients[name], parameter, slots[name], shared)
        return found, {"step": shared.step, "slots": slots}

    return update
