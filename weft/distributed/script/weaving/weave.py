"""`weave`: a plain PyTorch script, its loop untouched, trained on as many ranks as it was started on.

before    for x, y in loader: ...; loss.backward(); optimizer.step()
with N ranks, inside the same lines:
  loader      every rank gets its share of the same global batch, in the order that rank 0 draws
  backward    gradients are averaged in buckets as they are ready; when backward returns, they are all there
  step        every rank makes the same update
Other plans (local, elastic, gossip, servers) take their steps in `step` instead: see steps.py.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar, overload

import torch
from torch import nn
from torch.utils.data import DataLoader

from weft.distributed.consistency.server import ServedReplicas, Settings
from weft.distributed.place import AbstractPlace, LaunchedPlace
from weft.distributed.placement import DataParallel
from weft.distributed.placement.cut import cut_evenly
from weft.distributed.realise import RunSpec, realise
from weft.distributed.script.data.loaders import TrainingLoader, check_loader
from weft.distributed.script.data.shares import make_share
from weft.distributed.script.observation.events import PlanChosen
from weft.distributed.script.weaving.batch_norm import find_batch_norms, use_global_batch_norm, use_local_batch_norm
from weft.distributed.script.weaving.checks import (
    as_list,
    check_models,
    check_new,
    check_optimizers,
    check_words,
    device_of,
    plan_for,
)
from weft.distributed.script.weaving.clipping import clip_by_whole_norm
from weft.distributed.script.weaving.cuts import cut_whole_states
from weft.distributed.script.weaving.ends import close_at_end
from weft.distributed.script.weaving.incoming import Loss
from weft.distributed.script.weaving.model_facts import describe_woven
from weft.distributed.script.weaving.observing import observe
from weft.distributed.script.weaving.one_replica import begin_alike
from weft.distributed.script.weaving.own_hooks import OwnHook
from weft.distributed.script.weaving.seeding import reseed
from weft.distributed.script.weaving.stages import ScriptStages, check_stages
from weft.distributed.script.weaving.steps import (
    OptimizerSteps,
    check_optimizers_fit,
    takes_own_steps,
)
from weft.distributed.script.weaving.synchronous import exchange_in_backward
from weft.distributed.script.weaving.torch_parallel import find_torch_parallel, use_torch_parallel
from weft.distributed.script.weaving.torch_save import guard_torch_save
from weft.distributed.script.weaving.torch_updates import OwnUpdates, ShardUpdates
from weft.distributed.script.weaving.weaving import Weaving, weavings_of
from weft.distributed.script.world.world import World, find_world
from weft.errors import PlanError
from weft.specs import Plan
from weft.training.process import keep_freed_memory

__all__ = ["weave"]

ModelT = TypeVar("ModelT", bound=nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer | None)


@overload
def weave(
    model: ModelT,
    optimizer: OptimizerT,
    loader: DataLoader[Any] | None = None,
    plan: Plan | str = "data",
    *,
    loss: Loss = "mean",
    weight: Callable[[Any], Any] | None = None,
    batch_norm: Literal["local", "global"] = "local",
    rules: Mapping[str, str] | None = None,
    mesh: Any = None,
) -> tuple[ModelT, OptimizerT, Any]: ...


@overload
def weave(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    loader: DataLoader[Any] | None = None,
    plan: Plan | str = "data",
    *,
    loss: Loss = "mean",
    weight: Callable[[Any], Any] | None = None,
    batch_norm: Literal["local", "global"] = "local",
    rules: Mapping[str, str] | None = None,
    mesh: Any = None,
) -> tuple[Any, Any, Any]: ...


def weave(
    model: Any,
    optimizer: Any,
    loader: DataLoader[Any] | None = None,
    plan: Plan | str = "data",
    *,
    loss: Loss = "mean",
    weight: Callable[[Any], Any] | None = None,
    batch_norm: Literal["local", "global"] = "local",
    rules: Mapping[str, str] | None = None,
    mesh: Any = None,
) -> tuple[Any, Any, Any]:
    """Train the same script on every rank that was started, with the result that one process would give.

    The batch size of the loader is global: ranks share each batch. Clipping, accumulation, schedulers, gradient scalers
    and autocast work as they are. Running statistics (batch norm) are each rank's own during an epoch, and their mean
    when the loader has come to its end. With more than one rank, memory that a step frees stays with the process for
    the next step. The model trains on the device that it is on; move it there, and freeze what is not to be trained,
    before.

    Gradients are exchanged in backward. Afterwards the script may change them, in place or by another tensor in `grad`,
    from what all ranks have. Those that come from elsewhere (torch.autograd.grad) are to be the same on all ranks when
    `optimizer.step()` is called: `p.grad = weft.mean(gradient, weight=len(x))`.

    Plans that are not synchronous take their steps in `optimizer.step()`, with the gradients as they are then: clipping
    is of a rank's own. At servers the optimizer runs where the parameters are, with this one's groups and settings.
    Between epochs every rank holds the consensus of all.

    Args:
        model: or a list of models.
        optimizer: of torch.optim, or a list of them, or None where the script updates by itself.
        loader: or None where batches are made by hand (`weft.share`).
        plan: "data" (all ranks), or a plan such as "data=2 topology=ring" that the number of ranks must fit; a plan of
            the command (`weft launch --plan`) goes before it. With "shard" the optimizer keeps the state of its rank's
            pieces of parameters only.
        loss: whether the script's loss is the mean over the items of its batch, or their sum.
        weight: the number of items that the loss of a batch is a mean over (tokens, say); by default its samples.
        batch_norm: of a rank's own samples, or of those of all ranks.
        rules: from globs of modules' names to how plans split such layers ("column", "row", ...); the first that fits.
        mesh: of a model that PyTorch has parallelised: the dimension of its DeviceMesh over which samples differ, as
            `device_mesh["dp"]`. DTensors and FSDP modules say it by themselves; for stages of a pipeline it is needed.

    Returns:
        Model, optimizer and loader, the first two as they were given.

    Raises:
        UsageError: an argument is not what it should be; the same in one process.
        PlanError: the plan cannot be carried out with these, and why.

    Example: start with `weft launch --workers 2 script.py` or `torchrun --nproc-per-node 2 script.py`.

        model, optimizer, loader = weft.weave(model, optimizer, loader, plan="data")
    """
    models, optimizers, world = as_list(model), as_list(optimizer), find_world()
    tried = world.supervision.changes
    loss, weight, batch_norm = tried.get("loss", loss), tried.get("weight", weight), tried.get("batch_norm", batch_norm)
    check_models(models)
    check_optimizers(optimizers, models)
    check_words(loss, weight, batch_norm)
    check_new(world, models, optimizers)
    if loader is not None:
        check_loader(loader)
    wanted = _check_plan(plan_for(plan, world), models, optimizers, batch_norm)
    carried_out = wanted if world.num_ranks > 1 else Plan()
    laid_out = find_torch_parallel(models, mesh, carried_out, world.rank, world.num_ranks)
    world.follow(carried_out, laid_out.mesh if laid_out else None)
    weaving = Weaving(world, carried_out, models, optimizers, make_share(world, weight), loss, laid_out)
    world.supervision.tell(PlanChosen(str(weaving.plan)))
    if world.num_ranks > 1:
        _join(weaving, batch_norm, tuple((rules or {}).items()))
    if loader is not None:
        weaving.loader = TrainingLoader(loader, world, weaving)
    _register(weaving)
    if world.supervision.observers:
        observe(world.supervision.tell, weaving)
    return model, optimizer, weaving.loader


def _check_plan(
    plan: Plan, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], batch_norm: str
) -> Plan:
    """The plan, if it can be carried out with these."""
    check_optimizers_fit(plan, optimizers)
    if not plan.is_synchronous and batch_norm == "global" and find_batch_norms(models):
        raise PlanError(f"global batch norm needs ranks that meet in every step (plan: {plan}); use local")
    if plan.splits_model and takes_own_steps(plan):
        raise PlanError(
            f"ranks of a script that hold parts of a model update together in every step (plan: {plan}); "
            "use consistency=sync and topology=native, or train a recipe with `weft run`"
        )
    return plan


def _register(weaving: Weaving) -> None:
    """In one process by a reference that keeps nothing alive: a script may weave many models, one after the other."""
    world = weaving.world
    if world.num_ranks > 1:
        _note_loading(weaving)
        world.weavings.append(weaving)
        return
    guard_torch_save(world)
    known = weakref.proxy(weaving, lambda gone: world.weavings.__setitem__(slice(None), _without(world, gone)))
    world.weavings.append(known)
    for model in weaving.models:
        _note_loading_of(model, weaving)  # the hook holds the weaving, as long as the model lives


def _without(world: World, gone: object) -> list[Any]:
    return [weaving for weaving in world.weavings if weaving is not gone]


def _join(weaving: Weaving, batch_norm: str, rules: tuple[tuple[str, str], ...]) -> None:
    """Become one of the ranks; a process that is a server and nothing else serves, and leaves the script."""
    world, plan = weaving.world, weaving.plan
    _check_first_at_servers(weaving)
    if plan.pipeline > 1:
        check_stages(weaving)
    settings = {"plan": plan, "loss": weaving.loss, "batch_norm": batch_norm, "rules": rules}
    laid_out = weaving.torch_parallel
    models, optimizers = (weaving.models, weaving.optimizers) if not (laid_out and laid_out.differs) else ((), ())
    facts = describe_woven(models, optimizers, **settings)
    with world.meeting("weft.weave", facts, same_line=False):
        _join_others(weaving, batch_norm, rules)


def _join_others(weaving: Weaving, batch_norm: str, rules: tuple[tuple[str, str], ...]) -> None:
    world, plan = weaving.world, weaving.plan
    place = _place_on(world.place, device_of(weaving.models))
    guard_torch_save(world)
    keep_freed_memory()
    updates = OwnUpdates(weaving.optimizers, weaving.updated)
    spec = RunSpec(
        updates,
        seeds=(len(world.weavings),),
        run=world.supervision.run,
        replay=world.supervision.replay,
        whole_gradients=True,
        make_updates=partial(_updates_of_shard, weaving),
        rules=rules,
    )
    laid_out = weaving.torch_parallel
    replicas = weaving.keep_open(
        realise(plan, place, spec) if laid_out is None else use_torch_parallel(laid_out, plan, place)
    )
    if replicas is None:
        weaving.close()
        raise SystemExit(0)
    reseed(world)
    if batch_norm == "global":
        use_global_batch_norm(weaving)
    else:
        use_local_batch_norm(weaving)
    weaving.replicas = replicas
    if isinstance(replicas, DataParallel | ServedReplicas):
        world.dealer = replicas.shares
    if plan.pipeline > 1:
        assert isinstance(replicas, DataParallel), "synchronous ranks of a group"
        clip_by_whole_norm()
        weaving.stages = ScriptStages(weaving, replicas)
    elif not takes_own_steps(plan):
        assert isinstance(replicas, DataParallel), "synchronous ranks of a group"
        if plan.splits_parameters:
            begin_alike(weaving)
        clip_by_whole_norm()
        exchange_in_backward(weaving, replicas)
        cut_whole_states(weaving)
    else:
        replicas.join(weaving.state)
        weaving.updates = updates
        OptimizerSteps(weaving, replicas, updates)
        if isinstance(world.place, LaunchedPlace) and plan.channel != "all_reduce":
            close_at_end(world)


def _updates_of_shard(weaving: Weaving, shard: int, settings: Settings) -> ShardUpdates:
    """The optimizers of one shard, which holds the pieces that ranks cut for it."""
    pieces = cut_evenly(weaving.trained, settings.num_shards, may_cut=settings.may_cut)[shard]
    return ShardUpdates(weaving.optimizers, weaving.updated, pieces)


def _note_loading(weaving: Weaving) -> None:
    """Ranks agree on states that a script loads."""
    for module in (module for model in weaving.models for module in model.modules()):  # a script may load one part
        _note_loading_of(module, weaving)
    for optimizer in weaving.optimizers:
        optimizer.register_load_state_dict_post_hook(lambda *_: weaving.note_loading("optimizer"))


def _note_loading_of(module: nn.Module, weaving: Weaving) -> None:
    handle = module.register_load_state_dict_post_hook(OwnHook(lambda *_: weaving.note_loading("model")))
    weaving.attached.append((module._load_state_dict_post_hooks, handle.id))


def _check_first_at_servers(weaving: Weaving) -> None:
    """Servers, and responders, are those of one training: their addresses are taken."""
    if weaving.plan.channel != "all_reduce" and any(
        woven.plan.channel != "all_reduce" for woven in weavings_of(weaving.world)
    ):
        raise PlanError(
            f"the ranks have servers already, which hold the models of an earlier weave (plan: {weaving.plan}); "
            "give weave all models and optimizers in one call"
        )


def _place_on(place: AbstractPlace, device: torch.device) -> AbstractPlace:
    return place.with_device(device) if isinstance(place, LaunchedPlace) else place
