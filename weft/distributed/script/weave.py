"""`weave`: a plain PyTorch script, its loop untouched, trained on as many ranks as it was started on.

before    for x, y in loader: ...; loss.backward(); optimizer.step()
with N ranks, inside the same lines:
  loader      every rank gets its share of the same global batch, in the order that rank 0 draws
  backward    gradients are averaged in buckets as they are ready; when backward returns, they are all there
  step        every rank makes the same update
"""

from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from weft.distributed.place import LaunchedPlace
from weft.distributed.placement import DataParallel
from weft.distributed.realise import RunSpec, realise
from weft.distributed.script.gradients import GradientHooks
from weft.distributed.script.loaders import SharedLoader
from weft.errors import PlanError, UsageError
from weft.specs import CPU, Plan, parse_plan_for
from weft.training.process import keep_freed_memory

__all__ = ["weave"]

ModelT = TypeVar("ModelT", bound=nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


def weave(
    model: ModelT, optimizer: OptimizerT, loader: DataLoader[Any], plan: Plan | str = "data"
) -> tuple[ModelT, OptimizerT, Any]:
    """Train the same script on every rank that was started, with the result that one process would give.

    In one process everything is returned as it is. The batch size of the loader is global: ranks share each batch, and
    a rank's loss must be the mean over its samples. Clipping, accumulation and schedulers work as they are. Running
    statistics (batch norm) are each rank's own during an epoch, and their mean when the loader has come to its end.
    With more than one rank, memory that a step frees stays with the process for the next step. The model trains on the
    device that it is on; move it there, and freeze what is not to be trained, before.

    Args:
        plan: "data" (all ranks), or a plan such as "data=2 topology=ring" that the number of ranks must fit. With
            "shard" the optimizer keeps the state of its rank's pieces of parameters only, and has no `state_dict`.

    Example: start with `weft launch --workers 2 script.py` or `torchrun --nproc-per-node 2 script.py`.

        model, optimizer, loader = weft.weave(model, optimizer, loader, plan="data")
    """
    place = LaunchedPlace()
    wanted = _plan_for(plan, place.size)
    if place.size == 1:
        return model, optimizer, loader
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        raise UsageError("loader has no batches of indices to share (an iterable data set); give it a map-style one")
    _check_has_end(loader)
    keep_freed_memory()
    realised = realise(wanted, LaunchedPlace(place.launch, _device_of(model)), RunSpec(whole_gradients=True))
    replicas = realised.__enter__()  # until the process ends
    assert isinstance(replicas, DataParallel), "other plans have been refused"
    replicas.placement.take_over(optimizer, dict(model.named_parameters()))  # first, for it may refuse
    shared = SharedLoader(loader, replicas.group, tuple(model.buffers()))
    GradientHooks(replicas, model, shared, keep=realised)
    return model, optimizer, shared


def _plan_for(plan: Plan | str, num_ranks: int) -> Plan:
    """The plan that `weave` was given, if a loop with an optimizer of its own can carry it out."""
    wanted = parse_plan_for(plan, num_ranks)
    if wanted.num_ranks != num_ranks:
        numbers = f"plan: {wanted.num_ranks}, ranks: {num_ranks}"
        raise PlanError(f"plan needs another number of ranks than were started ({numbers}); use plan='data'")
    if wanted.num_shards:
        raise PlanError("servers update parameters themselves, a script's own optimizer does too; use topology=native")
    if not wanted.is_synchronous:
        raise PlanError(
            f"a script's own optimizer takes synchronous steps (consistency: {wanted.consistency}); leave it out"
        )
    return wanted


def _device_of(model: nn.Module) -> torch.device:
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())} or {CPU}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise UsageError(f"model lies on several devices ({names}); move it to one with model.to(device)")
    return devices.pop()


def _check_has_end(loader: DataLoader[Any]) -> None:
    try:
        len(loader)
    except TypeError:
        raise UsageError(
            "loader has no length, and rank 0 draws the batches of a whole epoch; give its sampler a __len__"
        ) from None
