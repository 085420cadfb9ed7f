"""Steps of plans that are taken where a script calls `optimizer.step()`: at servers, or of a rank's own.

    loss.backward()          gradients of this rank's share, as in one process
    clipping, scaling, ...   the script's affair: of this rank's gradients
    optimizer.step()         begin, every gradient as it is now, finish: as the loop of a recipe does it
        at servers           gradients go out, weights come back; optimizers of shards have this one's groups, settings
        of its own           the optimizer's own step, with weights of other ranks mixed in around it

Where a model has several optimizers, each call is a step of the plan, with gradients of its own parameters alone.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor

from weft.distributed.consistency.local import LocalAveraging
from weft.distributed.consistency.relaxed import RelaxedReplicas
from weft.distributed.placement.torch_steps import check_cuttable
from weft.distributed.script.weaving.incoming import IncomingGradients, RoundWeight, StepWeight
from weft.distributed.script.weaving.losses import all_losses
from weft.distributed.script.weaving.torch_updates import OwnUpdates, changes_of, settings_of_groups
from weft.distributed.script.weaving.weaving import Weaving
from weft.distributed.script.weaving.writes import ParameterWrites
from weft.errors import OutOfStepError, PlanError, UsageError
from weft.specs import Plan
from weft.training.optimizers.torch_optimizer import needs_closure, scope_of
from weft.training.replicas import AbstractReplicas, Update

__all__ = ["OptimizerSteps", "check_optimizers_fit", "check_parameters", "meets_all", "takes_own_steps"]

SCALER = ("grad_scale", "found_inf")
"""Attributes that a gradient scaler sets on an optimizer while it steps."""


def takes_own_steps(plan: Plan) -> bool:
    """Whether its steps are taken at `optimizer.step()`; else gradients are exchanged in backward."""
    return not plan.is_synchronous or plan.channel != "all_reduce"


def check_optimizers_fit(plan: Plan, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Whether a plan can be carried out with these optimizers.

    Raises:
        PlanError: it cannot, and why.
    """
    if plan.shard > 1:
        for optimizer in optimizers:
            check_cuttable(optimizer)
    if not takes_own_steps(plan):
        return
    if not optimizers:
        raise PlanError(f"plan takes its steps at optimizer.step(), and there is none (plan: {plan}); give weave one")
    for optimizer in optimizers:
        kind = type(optimizer)
        if needs_closure(optimizer) and plan.period == 1:
            raise PlanError(
                f"optimizer evaluates the loss several times a step, which the plan takes as one (optimizer: "
                f"{kind.__name__}, plan: {plan}); use consistency=sync or local, or an optimizer that takes gradients"
            )
        is_cut = plan.num_shards > 1 and plan.sends == "gradient"
        if is_cut and scope_of(kind) != "element" and kind not in (torch.optim.Adafactor, torch.optim.Muon):
            raise PlanError(
                f"optimizer may look at all parameters at once, and shards hold parts of them (optimizer: "
                f"{kind.__name__}, shards: {plan.num_shards}); use topology=server(1)"
            )


def meets_all(plan: Plan, step: int) -> bool:
    """Whether ranks cannot end a step, counted from 0, without all others.

    >>> from weft.specs import as_plan
    >>> [meets_all(as_plan("data=2 consistency=local(2)"), step) for step in range(4)]
    [False, True, False, True]
    """
    since = step + 1 - plan.num_synchronous_steps
    return plan.is_synchronous or (plan.channel == "all_reduce" and (since <= 0 or since % plan.period == 0))


@final
class _Abandoned:
    """Closes all that was opened for a weaving, as after an error, to end a wait in a step."""

    def __init__(self, weaving: Weaving) -> None:
        self._weaving = weaving

    def close(self) -> None:
        self._weaving.close(OutOfStepError("ranks are out of step"))


@final
class OptimizerSteps:
    """Stands in for the `step` of every optimizer of a weaving."""

    def __init__(self, weaving: Weaving, replicas: AbstractReplicas, updates: OwnUpdates) -> None:
        plan = weaving.plan
        self._weaving = weaving
        self._replicas = replicas
        self._updates = updates
        self._parameters = weaving.trained
        self._originals: list[Callable[..., Any]] = [optimizer.step for optimizer in weaving.optimizers]
        self._settings = settings_of_groups(weaving.optimizers)  # which the shards know
        self._is_served = plan.channel == "servers" and plan.sends == "gradient"
        in_rounds = self._is_served and not plan.commits_on_arrival
        if isinstance(replicas, RelaxedReplicas) and isinstance(replicas.scheme, LocalAveraging):
            replicas.scheme.adds_up_shares = True
        self._weights: list[RoundWeight | StepWeight] = []  # by optimizer: one backward may be for several
        for updated in weaving.updated:
            own = [parameter for name, parameter in updated.items() if name in self._parameters]
            weight = (RoundWeight if in_rounds else StepWeight)(weaving.share, weaving.loss, own)
            IncomingGradients(own, weight.factor)
            self._weights.append(weight)
        waiting = partial(weaving.world.waiting, "optimizer.step", _Abandoned(weaving))
        self._with_all, self._at_own_pace = waiting(together=True), waiting(together=False)
        self._changes = ChangedGradients(self._parameters) if self._is_served and plan.is_synchronous else None
        if plan.channel == "servers" and plan.sends != "weights":  # those of ranks stay theirs, and are only drawn near
            weaving.writes = ParameterWrites(self._parameters)
        for index, optimizer in enumerate(weaving.optimizers):
            self._stand_in(index, optimizer)

    def _stand_in(self, index: int, optimizer: torch.optim.Optimizer) -> None:
        @wraps(type(optimizer).step)
        def step(own: Any, closure: Callable[[], Any] | None = None) -> Any:
            own._opt_called = True  # schedulers ask
            return self.step(index, closure)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # so that they leave it as it is
        vars(optimizer)["step"] = MethodType(step, optimizer)
        # A gradient scaler then leaves it to the step to skip itself: ranks that skip must still meet the others.
        vars(optimizer)["_step_supports_amp_scaling"] = True
        if self._is_served:
            optimizer.register_state_dict_pre_hook(self._weaving.show_state)
            optimizer.register_state_dict_post_hook(_forget_state)

    @torch.no_grad()
    def step(self, index: int, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the optimizer with this number; the loss that a closure has given."""
        weaving, optimizer = self._weaving, self._weaving.optimizers[index]
        was_held = weaving.leave_consensus()
        weaving.settle_loading()
        losses: list[Any] = [None]
        if closure is not None and not needs_closure(optimizer):
            with torch.enable_grad():
                losses.append(all_losses(weaving, closure)())
            closure = None
        self._check(index)
        if weaving.writes is not None:
            weaving.writes.check()
        with use_no_scaler(optimizer, weaving.updated[index].values()) as is_skipped:
            arguments = [] if closure is None else [closure]
            self._updates.take_turn(index, lambda: losses.append(self._originals[index](*arguments)))
            self._exchange(index, self._take_weight(index, closure), is_skipped=is_skipped)
        if was_held:  # a step after the last batch of an epoch: whatever follows sees the consensus again
            weaving.enter_consensus()
        return next((loss for loss in losses if loss is not None), None)

    def _take_weight(self, index: int, closure: Callable[[], Any] | None) -> float:
        """Of the backward calls since the last step; of those that a closure is yet to make, that of the batch."""
        weight = self._weights[index].take()
        return weight if closure is None else self._weaving.share.weight

    def _exchange(self, index: int, weight: float, *, is_skipped: bool) -> None:
        """Begin, every gradient, finish; nothing in a round that was closed without this rank. A step that is skipped,
        or of a batch of which this rank has nothing, goes without gradients: the others count on it."""
        weaving, replicas = self._weaving, self._replicas
        if weaving.is_late():
            weaving.pass_over_step()
            return
        own, before = weaving.updated[index], replicas.next_step(weaving.num_steps)
        is_empty = is_skipped or not weight
        optimizer = weaving.optimizers[index]
        settings = changes_of(settings_of_groups(weaving.optimizers), self._settings) if self._is_served else None
        for hook in list(optimizer._optimizer_step_pre_hooks.values()) if self._is_served else ():
            hook(optimizer, (optimizer,), {})
        add = replicas.begin(weight)
        for name, parameter in self._parameters.items():
            add(name, None if is_empty or name not in own else parameter.grad)
        update = Update(self._updates, self._parameters, self._updates.state, 1.0, None, settings=settings)
        # Synchronous servers make no update in a round whose loss is not finite: where one rank skips, all do.
        loss = math.inf if is_skipped and self._changes is not None else 0.0
        with self._with_all if meets_all(weaving.plan, weaving.num_steps) else self._at_own_pace:
            _, state = replicas.finish(loss, update)
        if state is not self._updates.state:
            self._updates.adopt(state)
        for hook in list(optimizer._optimizer_step_post_hooks.values()) if self._is_served else ():
            hook(optimizer, (optimizer,), {})
        skips = weaving.plan.skips_rounds
        weaving.note_step(replicas.next_step(weaving.num_steps + 1) - before - 1 if skips else 0)
        if self._changes is not None:
            self._changes.forget()
        if weaving.writes is not None:
            weaving.writes.note()

    def _check(self, index: int) -> None:
        optimizer, own = self._weaving.optimizers[index], self._weaving.updated[index]
        check_parameters(optimizer, own, self._parameters)
        for name, parameter in own.items():
            gradient = parameter.grad
            if gradient is not None and gradient.layout is not torch.strided:
                raise UsageError(
                    f"gradient is not dense ({name}: {gradient.layout}); build the embedding with sparse=False"
                )
        if self._changes is not None and not _is_scaled(optimizer):
            self._changes.check(own)


@final
class ChangedGradients:
    """Notices gradients that a script has changed between backward and step: synchronous servers add up what ranks
    push, and a norm of the sum, by which a script would clip in one process, is known to nobody before."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._versions: dict[str, tuple[int, int]] = {}
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self._note, name))

    def _note(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None, "it has just been added to"
        self._versions[name] = id(parameter.grad), parameter.grad._version

    def check(self, parameters: Mapping[str, Tensor]) -> None:
        for name, parameter in parameters.items():
            gradient = parameter.grad
            known = self._versions.get(name)
            if gradient is not None and known is not None and known != (id(gradient), gradient._version):
                raise UsageError(
                    f"gradient was changed between backward and step ({name}), and servers add up those of all ranks "
                    "only then: a norm to clip by would be a rank's own; use topology=native"
                )

    def forget(self) -> None:
        self._versions.clear()


def check_parameters(
    optimizer: torch.optim.Optimizer, known: Mapping[str, Tensor], trained: Mapping[str, Tensor]
) -> None:
    """Whether an optimizer has the parameters that it was woven with, and those that are trained are known as such.

    Raises:
        UsageError: parameters were added or unfrozen since, of which the other ranks would never hear.
    """
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if count > len(known):
        about = f"woven: {len(known)}, now: {count}"
        raise UsageError(f"optimizer has got parameters after weave, which no rank exchanges ({about}); weave it last")
    for name, parameter in known.items():
        if parameter.requires_grad and name not in trained:
            raise UsageError(
                f"parameter was unfrozen after weave, and no rank exchanges it ({name}); unfreeze it before"
            )


@contextmanager
def use_no_scaler(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> Iterator[bool]:
    """Whether a gradient scaler wants a step to be skipped; if not, gradients are as they would be without it. What it
    has left on the optimizer for a step that does all of this by itself is out of sight meanwhile."""
    own: dict[str, Any] = vars(optimizer)
    left = {key: own.pop(key) for key in SCALER if key in own}
    scale, found = left.get("grad_scale"), left.get("found_inf")
    is_skipped = found is not None and bool(found)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if scale is not None and gradients and not is_skipped:
        torch._foreach_mul_(gradients, 1.0 / float(scale))
    try:
        yield is_skipped
    finally:
        own.update(left)


def _is_scaled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether gradients are still scaled: then a scaler has looked at them, and nobody else had a use for it."""
    return vars(optimizer).get("grad_scale") is not None


def _forget_state(optimizer: torch.optim.Optimizer, _state: Any) -> None:
    """Of what the servers keep, a copy was wanted, and was taken."""
    optimizer.state.clear()
