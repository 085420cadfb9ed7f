"""Models that PyTorch has parallelised: woven they train as in one process, and their checkpoints are anybody's."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import weft
from tests.command_line import run_weft
from tests.distributed.script import torch_parallel_script as script
from weft.distributed.script.weaving.dtensors import as_dtensor, cut_of_dtensor, local_of
from weft.distributed.script.weaving.torch_parallel import find_torch_parallel
from weft.errors import PlanError, UsageError
from weft.specs import Mesh, Plan, parse_plan


@contextmanager
def as_rank(rank: int, size: int = 4) -> Iterator[None]:
    """Be one of the ranks of a process group in which nothing is sent."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_four_processes_give_what_one_gives(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for kind in script.KINDS:
        script.train(kind, tmp_path)
    (tmp_path / "four").mkdir()
    outcome = run_weft(capfd, "launch", "--workers", "4", Path(script.__file__), "weft", tmp_path / "four")
    assert outcome.code == 0, outcome.err
    for kind in script.KINDS:
        one, four = (load_file(folder / f"{kind}.safetensors") for folder in (tmp_path, tmp_path / "four"))
        assert one.keys() == four.keys()
        assert all((one[name] - four[name]).abs().max() < 1e-14 for name in one), kind
        state = weft.read_state_dict(tmp_path / "four" / f"{kind}-checkpoint")
        before = weft.read_state_dict(tmp_path / f"{kind}-checkpoint")
        assert all((state[name] - before[name]).abs().max() < 1e-14 for name in before), kind


LAYOUTS: list[tuple[Any, ...]] = [
    (Shard(0), Shard(1)),
    (Shard(0), Shard(0)),
    (Replicate(), Shard(1)),
    (Shard(1), Replicate()),
]


@pytest.mark.parametrize("placements", LAYOUTS)
def test_a_dtensor_is_the_part_that_it_says(placements: tuple[Any, ...]) -> None:
    whole = torch.arange(35.0).view(5, 7)  # neither is divisible
    for rank in range(4):
        with as_rank(rank):
            mesh = init_device_mesh("cpu", (2, 2))
            tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            cut = cut_of_dtensor(tensor)
            assert torch.equal(cut.take(whole), local_of(tensor))
            again = as_dtensor(cut.take(whole), tensor)
            assert again.shape == whole.shape and torch.equal(local_of(again), local_of(tensor))


def test_rows_that_fsdp_takes_from_split_layers_are_the_ones() -> None:
    """Of rank 3 alone: PyTorch remembers the mesh of an earlier process group, and where its rank stood in it."""
    with as_rank(3):
        model: Any = nn.Sequential(nn.Linear(3, 8))
        whole = model[0].weight.detach().clone()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "parts"))
        parallelize_module(model, mesh["parts"], {"0": ColwiseParallel()}, src_data_rank=None)
        fully_shard(model, mesh=mesh["data"])
        weight = model[0].weight
        assert torch.equal(local_of(weight), whole[6:])
        assert torch.equal(cut_of_dtensor(weight).take(whole), whole[6:])


def test_a_sum_that_is_not_added_up_is_not_saved() -> None:
    with as_rank(0):
        mesh = init_device_mesh("cpu", (4,))
        tensor = distribute_tensor(torch.ones(3), mesh, [Replicate()], src_data_rank=None)
        partial = type(tensor).from_local(local_of(tensor), mesh, [Partial()])
        with pytest.raises(UsageError, match=r"a sum that nobody has added up .*; redistribute it"):
            cut_of_dtensor(partial)


def split_model(*names: str) -> nn.Sequential:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    model = nn.Sequential(nn.Linear(3, 8))
    parallelize_module(model, mesh[names], {"0": ColwiseParallel()}, src_data_rank=None)
    return model


def test_ranks_are_found_as_weft_sees_them() -> None:
    plan = Plan(data=4)
    with as_rank(3):
        assert find_torch_parallel([nn.Linear(1, 1)], None, plan, 3, 4) is None
        found = find_torch_parallel([split_model("y")], None, plan, 3, 4)
        assert found is not None and found.mesh == Mesh(3, data=2, tensor=2) and not found.reduced
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        stages = find_torch_parallel([nn.Linear(1, 1)], mesh["dp"], plan, 3, 4)
        assert stages is not None and stages.mesh == Mesh(3, pipeline=2, data=2) and stages.differs
        whole: Any = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (4,)))
        sharded = find_torch_parallel([whole], None, plan, 3, 4)
        assert sharded is not None and sharded.mesh == Mesh(3, data=4) and len(sharded.reduced) == 2


def test_layouts_that_cannot_be_followed_are_refused() -> None:
    with as_rank(1):
        with pytest.raises(UsageError, match=r"ranks of a replica: \[1, 3\].*; build one with init_device_mesh"):
            find_torch_parallel([split_model("x")], None, Plan(data=4), 1, 4)
        with pytest.raises(PlanError, match=r"parallelised by PyTorch already, .*shard=4.*; use data"):
            find_torch_parallel([split_model("y")], None, parse_plan("shard=4"), 1, 4)
