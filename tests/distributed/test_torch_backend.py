"""`backend="weft"` under torch.distributed, in two real processes: DDP gives what Gloo gives; FSDP2 and DTensor run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PRELUDE = """
import json, sys
import torch
import torch.distributed as dist
from weft.distributed.torch_backend import register

torch.set_num_threads(1)
rank, backend, path, answer = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
register()
register()
dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=2)

def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.Linear(300, 5))

def train(model, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 20, generator=generator)).square().mean().backward()
        optimizer.step()
"""

DDP = """
from torch.nn.parallel import DistributedDataParallel
model = build()
train(DistributedDataParallel(model))
result = [p.detach().flatten().tolist() for p in model.parameters()]
"""

FSDP_AND_DTENSOR = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
mesh = init_device_mesh("cpu", (2,))
model = build()
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
train(model)
weights = [p.full_tensor().detach().flatten().tolist() for p in model.parameters()]
a, b = torch.arange(24.0).view(6, 4), torch.arange(24.0).view(4, 6)
products = [
    (distribute_tensor(a, mesh, [Shard(i)]) @ distribute_tensor(b, mesh, [Shard(j)])).full_tensor()
    for i, j in ((0, 1), (1, 0))
]
result = [weights, all(torch.equal(product, a @ b) for product in products)]
"""

CALLS = """
mine = torch.full((2,), float(rank))
parts = [torch.empty(2) for _ in range(2)]
result = []
dist.all_gather(parts, mine)
result.append(torch.cat(parts).tolist())
out = torch.empty(2)
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
names = [None, None]
dist.all_gather_object(names, f"rank {rank}")
result.append(names)
average = torch.full((3,), float(rank))
work = dist.all_reduce(average, op=dist.ReduceOp.AVG, async_op=True)
result.append(work.get_future().wait()[0].tolist())
other = torch.empty(1)
if rank == 0:
    dist.send(torch.tensor([7.0]), 1)
else:
    dist.recv(other, 0)
    result.append(other.tolist())
half = dist.new_group([1])
dist.barrier()
"""

FINISH = """
dist.destroy_process_group()
with open(answer, "w") as file:
    json.dump(result, file)
"""


def run(program: str, backend: str, folder: Path) -> list[Any]:
    folder.mkdir()
    script = PRELUDE + program + FINISH
    answers = [folder / f"answer-{rank}.json" for rank in range(2)]
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-W",
                "error",
                "-c",
                script,
                str(rank),
                backend,
                str(folder / "store"),
                str(answers[rank]),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank, process in enumerate(ranks):
            _, errors = process.communicate(timeout=90)
            assert process.returncode == 0, f"rank {rank} of {backend}:\n{errors}"
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    return [json.loads(answer.read_text()) for answer in answers]


@pytest.mark.slow
def test_ddp_gives_the_bits_of_gloo(tmp_path: Path) -> None:
    weft, gloo = run(DDP, "weft", tmp_path / "weft"), run(DDP, "gloo", tmp_path / "gloo")
    assert weft[0] == weft[1] == gloo[0]


@pytest.mark.slow
def test_fsdp2_and_dtensor_give_what_gloo_gives(tmp_path: Path) -> None:
    weft = run(FSDP_AND_DTENSOR, "weft", tmp_path / "weft")
    gloo = run(FSDP_AND_DTENSOR, "gloo", tmp_path / "gloo")
    assert weft == gloo
    assert weft[0][1] is True


@pytest.mark.slow
def test_the_other_calls(tmp_path: Path) -> None:
    weft, gloo = run(CALLS, "weft", tmp_path / "weft"), run(CALLS.replace("AVG", "SUM"), "gloo", tmp_path / "gloo")
    averages = [weft[0].pop(6), weft[1].pop(6)]
    sums = [gloo[0].pop(6), gloo[1].pop(6)]
    assert weft == gloo
    assert averages == [[0.5] * 3] * 2
    assert sums == [[1.0] * 3] * 2
