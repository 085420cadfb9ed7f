"""Synchronous ranks of a group: gradients are exchanged in backward, and the script's optimizers step as they are.

backward    GradientHooks: buckets set out as they are ready, of one model at a time
step        has every gradient been exchanged, are the parameters those that were woven; then the script's own step
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, closing
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from weft.distributed.codecs import AbstractCodec
from weft.distributed.placement import DataParallel, ShardedModel
from weft.distributed.placement.exchange import GradientExchange
from weft.distributed.placement.factors.layers import FactoredLayers
from weft.distributed.script.weaving.discarded import DiscardedGradients
from weft.distributed.script.weaving.gradients import Backward, GradientHooks
from weft.distributed.script.weaving.incoming import IncomingGradients, is_incoming
from weft.distributed.script.weaving.losses import close_over_all
from weft.distributed.script.weaving.momentum import MomentumTaker
from weft.distributed.script.weaving.names import prefix_of
from weft.distributed.script.weaving.pieces import PieceGradients
from weft.distributed.script.weaving.placing import place_models, weigh_models
from weft.distributed.script.weaving.same_gradients import check_same_gradients
from weft.distributed.script.weaving.scaling import FollowedScale, follow_scales
from weft.distributed.script.weaving.steps import check_parameters
from weft.distributed.script.weaving.weaving import Weaving, weavings_of
from weft.distributed.script.world.world import find_world
from weft.training.weighting import Weighting

__all__ = ["exchange_in_backward"]


def exchange_in_backward(weaving: Weaving, replicas: DataParallel) -> None:
    """Hang the exchange of each model on its backward, and the checks of a step on the optimizers."""
    world, group, num_models = weaving.world, replicas.group, len(weaving.models)
    place_models(weaving, replicas.placement)
    number = 1 + sum(len(woven.models) for woven in weavings_of(world))  # of its first model, among all that are woven
    for optimizer in weaving.optimizers:
        replicas.placement.take_over(optimizer, weaving.parameters)  # first, for it may refuse
        if weaving.plan.shard > 1 and not weaving.plan.splits_parameters:
            _note_steps(optimizer, world.waiting("optimizer.step", group))
    taker = MomentumTaker(replicas.codec, weaving.optimizers) if replicas.codec.takes_momentum else None
    if num_models == 1:
        _find_factors(weaving, replicas.factors, 0)
    replicas.join(weaving.state)
    trained, weighting = weaving.trained, replicas.placement.weighting
    if weighting is None and weaving.reduced:  # FSDP takes the plain mean
        weighting = Weighting()
    kept = [parameter for parameter in trained.values() if id(parameter) not in weaving.reduced]
    weaving.backward = Backward(kept, weaving.share, group.size, weaving.loss, is_weighted=weighting is not None)
    weaving.backward.dealer, weaving.backward.gather = replicas.shares, replicas.gather
    if taker is not None:
        weaving.backward.prepare = taker.follow
    if not replicas.codec.is_exact:
        _follow_unsent(weaving, weaving.backward, replicas.codec)
    if weighting is not None:
        weigh_models(weaving, weighting, weaving.backward.factor)
    replicas.exchange.keeps_sums = True
    _scale_parts(weaving, replicas)
    for index in range(num_models):
        prefix = prefix_of(index, num_models)
        own = {name: p for name, p in trained.items() if name.startswith(prefix) and id(p) not in weaving.reduced}
        exchange, alone, factors = replicas.exchange, group, replicas.factors
        if num_models > 1:
            alone = group.split(0, group.rank)
            weaving.keep_open(closing(alone))
            factors = FactoredLayers() if factors is not None else None
            _find_factors(weaving, factors, index)
            exchange = GradientExchange(alone, own, replicas.codec, factors=factors)
        if isinstance(replicas.placement, ShardedModel):
            PieceGradients(
                weaving, replicas.placement.blocks, exchange, weaving.backward, world.waiting("forward", group)
            )
            continue
        kind = "backward" if number + index == num_models == 1 else f"backward of model {number + index}"
        GradientHooks(own, exchange, weaving.backward, index, world.waiting(kind, alone), factors)
        if factors is not None:
            _follow_backward(factors, weaving.backward)
    for optimizer, updated in zip(weaving.optimizers, weaving.updated, strict=True):
        hook = optimizer.register_step_pre_hook(partial(_before_step, weaving, updated, trained))
        before: Any = optimizer._optimizer_step_pre_hooks
        before.move_to_end(hook.id, last=False)  # before pieces stand for parameters
        optimizer.register_step_post_hook(partial(_after_step, weaving, updated))


def _find_factors(weaving: Weaving, factors: FactoredLayers | None, index: int) -> None:
    """Let the layers of one model keep factors in place of gradients of weights."""
    if factors is not None:
        names = {id(parameter): name for name, parameter in weaving.trained.items()}
        layers = factors.find([weaving.models[index]], names)
        weaving.attached += [(vars(layer), "forward") for layer in layers]


def _follow_backward(factors: FactoredLayers, backward: Backward) -> None:
    factors.scale = backward.factor
    factors.is_held = lambda: backward.is_held
    factors.is_own_hook = is_incoming


def _follow_unsent(weaving: Weaving, backward: Backward, codec: AbstractCodec) -> None:
    """Of a codec that may keep back a part of gradients, which have to do with what becomes of the others."""
    told_as, is_first = str(weaving.plan.compress), weaving.world.is_first
    updated = {name for own in weaving.updated for name in own}
    backward.discarded = DiscardedGradients(codec, told_as, updated, is_first=is_first)
    backward.scale = FollowedScale(codec, told_as, is_first=is_first)
    follow_scales(_followed_scales)


def _followed_scales() -> list[FollowedScale]:
    """Of the script that asks."""
    found = [weaving.backward for weaving in weavings_of(find_world())]
    return [backward.scale for backward in found if backward is not None and backward.scale is not None]


def _scale_parts(weaving: Weaving, replicas: DataParallel) -> None:
    """Gradients that ranks of one replica have in terms (of some rows of pictures each) are added up, and what was in
    them before is not: N terms come in N times as large, and their mean goes out."""
    num_terms = replicas.mesh.size("tensor")
    terms = [p for name, p in weaving.trained.items() if "tensor" in replicas.placement.reduced_over(name)]
    if num_terms > 1 and terms:
        IncomingGradients(terms, lambda: float(num_terms))


def _note_steps(optimizer: torch.optim.Optimizer, waiting: AbstractContextManager[None]) -> None:
    """For steps in which ranks wait for each other's pieces."""
    original = optimizer.step

    @wraps(getattr(original, "__func__", original))  # what schedulers and profilers have left on it stays
    def step(_optimizer: Any, *arguments: Any, **options: Any) -> Any:
        with waiting:
            return original(*arguments, **options)

    vars(optimizer)["step"] = MethodType(step, optimizer)


def _before_step(
    weaving: Weaving,
    own: Mapping[str, Tensor],
    trained: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    check_parameters(optimizer, own, trained)
    assert weaving.backward is not None, "gradients are exchanged there"
    weaving.backward.check_exchanged()
    changed = close_over_all(weaving, arguments, options) if len(arguments) > 1 or options else None
    if weaving.backward.discarded is not None:
        weaving.backward.discarded.is_in_closure = changed is not None
    if changed is None:  # else the closure brings the gradients
        left = {name: parameter for name, parameter in own.items() if id(parameter) not in weaving.reduced}
        check_same_gradients(weaving.world, weaving.backward.not_exchanged(left))
    return changed


def _after_step(weaving: Weaving, own: Mapping[str, Tensor], *_: Any) -> None:
    assert weaving.backward is not None, "gradients are exchanged there"
    weaving.backward.exchanged.difference_update(own)
    if weaving.backward.discarded is not None:
        weaving.backward.discarded.is_in_closure = False
    weaving.note_step()
