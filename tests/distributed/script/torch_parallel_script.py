"""A script whose model PyTorch parallelises, in one of three ways one after the other; in one process plainly."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft

KINDS = ("tensor", "sharded", "pipeline")
STAGES = (("a", "b"), ("c", "d"))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layers = {"a": nn.Linear(6, 8), "b": nn.LayerNorm(8), "c": nn.Linear(8, 4), "d": nn.Linear(4, 1)}
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model.double()


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def parallelise(model: nn.Sequential, kind: str) -> tuple[nn.Module, Any, Any]:
    """The model, a schedule if it is one of stages, and the mesh that weave is to be told of."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if kind == "pipeline":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        index = mesh["pp"].get_local_rank()
        own = nn.Sequential()
        for name in STAGES[index]:
            own.add_module(name, model.get_submodule(name))
        stage = PipelineStage(own, index, 2, torch.device("cpu"), group=mesh["pp"].get_group())
        return own, ScheduleGPipe(stage, 2, loss_fn=loss_of), mesh["dp"]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"c": ColwiseParallel(), "d": RowwiseParallel()})
    if kind == "sharded":
        fully_shard(model, mesh=mesh["dp"])
    return model, None, None


def train(kind: str, folder: Path) -> None:
    """Two epochs, between which all is saved, spoiled and loaded."""
    model, schedule, mesh = parallelise(build(), kind) if weft.num_ranks > 1 else (build(), None, None)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    data: Any = torch.randn(10, 6, generator=torch.Generator().manual_seed(1)).double()
    size = 5 if schedule is None and kind != "pipeline" else 8  # 5: shares of 3 and 2
    loader: Any = torch.utils.data.DataLoader(data, batch_size=size, drop_last=True)
    model, optimizer, loader = weft.weave(model, optimizer, loader, mesh=mesh)
    for epoch in range(2):
        for x in loader:
            optimizer.zero_grad()
            target = x.sum(1, keepdim=True)
            if schedule is None:
                loss_of(model(x), target).backward()
            else:
                schedule.step(*([x] if weft.rank < 2 else []), **({} if weft.rank < 2 else {"target": target}))
            optimizer.step()
        if epoch == 0:
            weft.save(folder / f"{kind}-checkpoint", model=model, optimizer=optimizer, loader=loader)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
            weft.load(folder / f"{kind}-checkpoint", model=model, optimizer=optimizer, loader=loader)
    weft.export(folder / f"{kind}.safetensors", model)


if __name__ == "__main__":
    dist.init_process_group(sys.argv[1])
    for one in KINDS:
        train(one, Path(sys.argv[2]))
