"""Rank programs under torch.distributed's own calls: each runs over the given backends, one after another."""

import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.distributed.torch_backend import register


def run(program: str, backends: list[str]) -> list[Any]:
    """The results of a program of this file, one per backend. Warnings are errors, as in the tests."""
    rank, size, folder = int(os.environ["WEFT_RANK"]), int(os.environ["WEFT_SIZE"]), os.environ["WEFT_MEETING"]
    results = []
    register()
    register()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for backend in backends:
            store = os.path.join(folder, f"store-{backend}")
            dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
            results.append(_find(program)(rank))
            dist.destroy_process_group()
    return results


def _find(program: str) -> Callable[[int], list[Any]]:
    from tests.distributed.torch_backend_features import FEATURES

    return next(function for function in (*PROGRAMS, *FEATURES) if function.__name__ == program)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 5))


def train(model: nn.Module, rank: int, steps: int = 4) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 20, generator=generator)).square().mean().backward()
        optimizer.step()


def ddp(rank: int) -> list[Any]:
    from torch.nn.parallel import DistributedDataParallel

    model = build()
    train(DistributedDataParallel(model), rank)
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def fsdp_and_dtensor(rank: int) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    model = build()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, rank)
    weights = []
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        weights.append(parameter.full_tensor().detach().flatten().tolist())
    a, b = torch.arange(24.0).view(6, 4), torch.arange(24.0).view(4, 6)
    products = []
    for i, j in ((0, 1), (1, 0)):
        product = distribute_tensor(a, mesh, [Shard(i)]) @ distribute_tensor(b, mesh, [Shard(j)])
        assert isinstance(product, DTensor)
        products.append(product.full_tensor())
    return [weights, all(torch.equal(product, a @ b) for product in products)]


def calls(rank: int) -> list[Any]:
    """Gloo has no average: there the last result but one is the sum."""
    mine, out, other = torch.full((2,), float(rank)), torch.empty(2), torch.empty(1)
    parts = [torch.empty(2) for _ in range(2)]
    result: list[Any] = []
    dist.all_gather(parts, mine)
    result.append(torch.cat(parts).tolist())
    dist.reduce_scatter(out, [mine, mine + 10], op=dist.ReduceOp.SUM)
    result.append(out.tolist())
    dist.scatter(out, [mine + 5, mine + 6] if rank == 1 else None, src=1)
    result.append(out.tolist())
    dist.gather(mine, parts if rank == 0 else None, dst=0)
    total = mine.clone()
    dist.reduce(total, dst=0, op=dist.ReduceOp.MAX)
    result.append(total.tolist())
    uneven = torch.empty(3)
    send, receive = ([1, 2], [1, 2]) if rank == 0 else ([2, 1], [2, 1])
    dist.all_to_all_single(uneven, torch.arange(3.0) + 10 * rank, receive, send)
    result.append(uneven.tolist())
    names: list[Any] = [None, None]
    dist.all_gather_object(names, f"rank {rank}")
    result.append(names)
    average = torch.full((3,), float(rank))
    operation = dist.ReduceOp.SUM if dist.get_backend() == "gloo" else dist.ReduceOp.AVG
    work = dist.all_reduce(average, op=operation, async_op=True)
    result.append(work.get_future().wait()[0].tolist())
    if rank == 0:
        dist.send(torch.tensor([7.0]), 1)
    else:
        dist.recv(other, 0)
        result.append(other.tolist())
    dist.new_group([1])
    dist.barrier()
    return result


def unequal_parts(rank: int) -> list[Any]:
    """Gloo has no lists of unequal parts: there messages do the same."""
    shapes = [(2, 3), (1,)]
    mine, result = torch.full(shapes[rank], float(rank + 1)), list[Any]()
    parts = [torch.empty(shape) for shape in shapes]
    strided, shares = torch.zeros(3, 2).T if rank == 0 else torch.zeros(1), [torch.full(shape, 5.0) for shape in shapes]
    if dist.get_backend() == "gloo":
        for source, part in enumerate(parts):
            part.copy_(mine if source == rank else part)
            dist.broadcast(part, source)
        strided.copy_(10.0 * torch.ones(shapes[rank]))
    else:
        dist.all_gather(parts, mine)
        dist.reduce_scatter(strided, shares)
    result += [part.tolist() for part in parts] + [strided.tolist()]
    empty = torch.empty(3 if rank == 1 else 0, 2)
    sent = torch.arange(6.0).view(3, 2) if rank == 0 else torch.empty(0, 2)
    dist.all_to_all_single(empty, sent, [3, 0] if rank == 1 else [0, 0], [0, 3] if rank == 0 else [0, 0])
    return [*result, empty.tolist()]


def like_gloo(rank: int) -> list[Any]:
    """Calls that Gloo has, and that we lacked."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model = nn.Linear(2, 2)
    weights: dict[str, Any] = (
        {name: torch.ones_like(value) for name, value in model.state_dict().items()} if rank == 0 else {}
    )
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    result: list[Any] = [model.weight.tolist()]
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        bits, at_root = torch.tensor([12, 7]) >> rank, torch.tensor([12, 7]) >> rank
        dist.all_reduce(bits, op)
        dist.reduce(at_root, 1, op)
        result += [bits.tolist(), at_root.tolist() if rank == 1 else []]
    inputs = [torch.full((2,), float(rank)), torch.full((1, 3), 10.0 + rank)]
    outputs = [[torch.empty(2), torch.empty(1, 3)] for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to take it away
        dist.all_gather_coalesced(outputs, inputs)
    return [*result, [[tensor.tolist() for tensor in row] for row in outputs]]


def limits(rank: int) -> list[Any]:
    """How a wait ends that was given less time than the call takes, and that the call goes on."""
    tensor, store = torch.ones(4), dist.distributed_c10d._get_default_store()
    said = ""
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        try:
            work.wait(timedelta(milliseconds=50))
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        store.set("waited", "")
    else:
        store.wait(["waited"])
        work = dist.all_reduce(tensor, async_op=True)
    assert work.wait(timedelta(seconds=60))
    return [said, tensor.tolist()]


PROGRAMS = (ddp, fsdp_and_dtensor, calls, unequal_parts, like_gloo, limits)
