"""Rank programs under torch.distributed's own calls: each runs over the given backends, one after another."""

import os
import warnings
from collections.abc import Callable
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
            results.append(PROGRAMS[program](rank))
            dist.destroy_process_group()
    return results


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


PROGRAMS: dict[str, Callable[[int], list[Any]]] = {"ddp": ddp, "fsdp_and_dtensor": fsdp_and_dtensor, "calls": calls}
