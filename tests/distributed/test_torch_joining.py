"""Scripts that join through torch.distributed, under `weft launch` as under torchrun, over Gloo and our backend."""

from pathlib import Path

import pytest

from tests.command_line import run_weft

PLAIN = """
import sys, torch, torch.distributed as dist, weft
for backend in ("gloo", "weft"):
    dist.init_process_group(backend)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2, bias=False))
    torch.manual_seed(dist.get_rank())
    model(torch.randn(3, 4)).square().mean().backward()
    print(dist.get_backend(), dist.get_world_size(), model.module.weight.grad.flatten().tolist(), flush=True)
    if backend == "gloo":
        dist.destroy_process_group()
torch.manual_seed(0)
model, loader = torch.nn.Linear(4, 1), torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4)
model, optimizer, loader = weft.weave(model, torch.optim.SGD(model.parameters(), 0.1), loader)
for batch in loader:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
total = model.weight.detach().clone()
dist.all_reduce(total)
print(torch.equal(total, 2 * model.weight.detach()), flush=True)
"""
ACCELERATE = """
import torch, torch.distributed as dist
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model, loader = torch.nn.Linear(4, 1), torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
for batch in loader:
    optimizer.zero_grad()
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
weights = accelerator.gather(accelerator.unwrap_model(model).weight.detach())
print(dist.get_backend(), accelerator.num_processes, bool((weights[0] == weights[1]).all()), flush=True)
"""
TRAINER = """
import sys, torch, torch.distributed as dist
from transformers import Trainer, TrainingArguments

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": (self.linear(x).squeeze(-1) - labels).square().mean()}

torch.manual_seed(0)
data = [{"x": x, "labels": x.sum()} for x in torch.randn(16, 4)]
args = TrainingArguments(sys.argv[1], per_device_train_batch_size=2, report_to=[], save_strategy="no")
trainer = Trainer(model=Net(), args=args, train_dataset=data)
steps = trainer.train().global_step
weights = [torch.empty(1, 4) for _ in range(2)]
dist.all_gather(weights, trainer.model.linear.weight.detach())
print(dist.get_backend(), args.world_size, steps, torch.equal(*weights), flush=True)
"""


def launch(capture: pytest.CaptureFixture[str], folder: Path, text: str) -> list[str]:
    """The last lines that rank 0 printed."""
    script = folder / "script.py"
    script.write_text(text)
    outcome = run_weft(capture, "launch", "--workers", "2", script, folder / "out")
    assert outcome.code == 0, outcome.err
    return outcome.out.splitlines()


@pytest.mark.slow
def test_the_backend_is_known_to_plain_scripts(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Also beside weave."""
    gloo, weft, agrees = launch(capfd, tmp_path, PLAIN)
    assert gloo.split(maxsplit=1)[0] == "gloo" and weft.split(maxsplit=1)[0] == "weft"
    assert gloo.split(maxsplit=1)[1] == weft.split(maxsplit=1)[1]
    assert agrees == "True"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "weft"])
def test_accelerate_joins(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Each rank used to train a copy of its own: Accelerate takes no part on a CPU unless it is told to."""
    pytest.importorskip("accelerate")
    if backend != "gloo":
        monkeypatch.setenv("WEFT_TORCH_BACKEND", backend)
    assert launch(capfd, tmp_path, ACCELERATE)[-1] == f"{backend} 2 True"


@pytest.mark.slow
def test_trainers_join(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.setenv("WEFT_TORCH_BACKEND", "weft")
    assert launch(capfd, tmp_path, TRAINER)[-1] == "weft 2 12 True"
