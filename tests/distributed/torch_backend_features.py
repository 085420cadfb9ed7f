"""Rank programs about what torch builds on a backend: hooks, checkpoints, debug modes, parts of groups."""

import os
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.torch_backend_programs import build, train


def hooks(rank: int) -> list[Any]:
    """Parameters after training with each of DDP's compression hooks."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    states = [powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, matrix_approximation_rank=r) for r in (1, 2)]
    result = []
    registrations: list[Callable[[Any], object]] = [
        lambda model: model.register_comm_hook(states[0], powerSGD_hook.powerSGD_hook),
        lambda model: model.register_comm_hook(states[1], powerSGD_hook.powerSGD_hook),
        lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook),
        lambda model: model._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS),
        lambda model: model._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE),
    ]
    for register_hook in registrations:
        model = DistributedDataParallel(build())
        register_hook(model)
        train(model, rank)
        result.append([float(parameter.detach().sum()) for parameter in model.parameters()])
    return result


def nested_futures(rank: int) -> list[Any]:
    """Callbacks that wait for futures that come after their own, three deep, and for one that came before it."""
    tensors = [torch.full((3,), float(rank + number)) for number in range(5)]
    early = dist.all_reduce(tensors[4], async_op=True).get_future()

    def reduce_next(number: int) -> Any:
        future = dist.all_reduce(tensors[number], async_op=True).get_future()
        if number < 3:
            future = future.then(lambda _: reduce_next(number + 1).wait())
        return future

    reduce_next(0).then(lambda _: early.wait()).wait()
    return [tensor.tolist() for tensor in tensors]


def checkpoints(rank: int) -> list[Any]:
    """What a checkpoint holds that was written in the background."""
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import async_save

    folder = [tempfile.mkdtemp(dir=os.environ["WEFT_MEETING"])] if rank == 0 else [None]
    dist.broadcast_object_list(folder)
    state: dict[str, Any] = {"weight": torch.arange(4.0), "step": 7}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about its own storage
        saving: Any = async_save(state, checkpoint_id=folder[0])
        saving.result()
        loaded: dict[str, Any] = {"weight": torch.zeros(4), "step": 0}
        load(loaded, checkpoint_id=folder[0])
    return [loaded["weight"].tolist(), loaded["step"]]


def counted(rank: int) -> list[Any]:
    """Calls that CommDebugMode counts, of torch.distributed and of DTensor; results are those without it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (2,))
    mine, out, parts = torch.full((2,), float(rank)), torch.empty(4), [torch.empty(2), torch.empty(2)]
    with CommDebugMode() as mode:
        dist.all_reduce(mine)
        dist.all_gather_single(out, mine + rank)
        dist.all_gather(parts, mine)
        dist.broadcast(mine, 0)
        dist.reduce_scatter_single(mine, out)
        dist.all_to_all_single(out, out.clone())
        dist.barrier()
        whole = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
    counts = {str(call): number for call, number in sorted(mode.get_comm_counts().items(), key=str)}
    return [counts, mode.get_total_counts(), out.tolist(), torch.stack(parts).tolist(), whole.to_local().tolist()]


def profiled(rank: int) -> list[Any]:
    """Names and shapes that the profiler shows, and that DDP's calls are among them."""
    model = DistributedDataParallel(nn.Linear(3, 2))
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        model(torch.ones(1, 3)).sum().backward()
        dist.all_reduce(torch.ones(2, 3))
        dist.broadcast(torch.ones(4), 0, async_op=True).wait()
        dist.barrier()
    own = f"{dist.get_backend()}:"
    events = [event for event in profile.function_events if event.name.startswith(own)]
    return [[event.name.removeprefix(own), event.input_shapes, event.is_async] for event in events]


def subgroups(rank: int) -> list[Any]:
    """Groups of parts of the world, by each of torch's ways but that of splitting."""
    total, result = torch.tensor([float(rank + 1)]), list[Any]()
    pair, alone = dist.new_group([0, 1], group_desc="pair"), dist.new_group([rank], use_local_synchronization=True)
    own, every = dist.new_subgroups(1)
    by_list, _ = dist.new_subgroups_by_enumeration([[0], [1]])
    for group in (pair, alone, own, by_list):
        dist.all_reduce(total, group=group)
        result.append(
            [float(total), dist.get_rank(group), dist.get_world_size(group), dist.get_process_group_ranks(group)]
        )
    before = pair._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(total, group=pair)
    return [*result, len(every), pair._get_sequence_number_for_group() - before]


def split(rank: int) -> list[Any]:
    """Splitting a group used to end in a segmentation fault."""
    whole: Any = dist.group.WORLD
    single = whole.split_group([rank], group_name=f"single-{rank}", group_desc="one")
    turned = whole.split_group([1, 0], timeout=timedelta(seconds=20))
    first_only = whole.split_group([0])
    tensors = [torch.full((2,), float(rank + 1)) for _ in range(2)]
    single.allreduce([tensors[0]]).wait()
    root = dist.BroadcastOptions()
    turned.broadcast([tensors[1]], root).wait()
    result = [single.size(), single.group_name == f"single-{rank}", turned.rank(), (first_only is None) == (rank == 1)]
    for group in (single, turned, first_only):
        if group is not None:
            group.shutdown()
    return [*result, *(tensor.tolist() for tensor in tensors)]


def barriers(rank: int) -> list[Any]:
    """A barrier that all reach, one with a limit of its own, and what each says of one that rank 1 does not reach."""
    whole: Any = dist.group.WORLD
    whole.monitored_barrier(timedelta(seconds=20))
    whole.monitored_barrier(wait_all_ranks=True)
    store, said = dist.distributed_c10d._get_default_store(), []
    if rank == 0:
        attempts: list[Callable[[], object]] = [
            lambda: whole.monitored_barrier(timedelta(milliseconds=30), wait_all_ranks=True),
            lambda: dist.barrier(timeout=timedelta(milliseconds=30)),
        ]
        for call in attempts:
            try:
                call()
            except RuntimeError as error:
                said.append(str(error))
        store.set("said", "")
    else:
        store.wait(["said"])
        dist.barrier()
    return said


FEATURES = (hooks, nested_futures, checkpoints, counted, profiled, subgroups, split, barriers)
