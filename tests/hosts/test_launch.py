"""Scripts on two hosts, started by the same command on each: by `weft launch --rendezvous`, and by torchrun."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.hosts import Hosts
from weft.secret import make_secret

PORT = 29500

# The group's kind tells over what ranks talk. The script's own process group is opened where the launch says how.
SCRIPT = """
import json, os, sys
import torch, weft
from weft.distributed.place import find_launch, open_group

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
generator = torch.Generator().manual_seed(2)
x, y = torch.randn(64, 20, generator=generator), torch.randint(0, 3, (64,), generator=generator)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
model, optimizer, loader = weft.weave(model, optimizer, loader)
for epoch in range(3):
    for inputs, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        if sys.argv[1:] == [os.environ["RANK"]]:
            raise ValueError("planted")
        if sys.argv[1:] == ["exit", os.environ["RANK"]]:
            os._exit(0)
total = None
if "WEFT_RENDEZVOUS" in os.environ:
    torch.distributed.init_process_group("gloo")
    ones = torch.ones(1)
    torch.distributed.all_reduce(ones)
    total = int(ones)
    torch.distributed.destroy_process_group()
group = open_group(find_launch(), name="test")
if group.rank == 0:
    weights = [parameter.sum().item() for parameter in model.parameters()]
    print(json.dumps({"weights": weights, "group": type(group).__name__, "total": total}))
group.close()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def weft(hosts: Hosts, *words: str) -> list[list[str]]:
    """The same command for each host."""
    common = [sys.executable, "-m", "weft", "launch", "--rendezvous", f"{hosts[0].address}:{PORT}", "--num-hosts", "2"]
    return [[*common, "--host-rank", str(host), *words] for host in range(len(hosts))]


def torchrun(hosts: Hosts, per_host: int, script: str) -> list[list[str]]:
    common = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(per_host)]
    common += ["--master-addr", hosts[0].address, "--master-port", str(PORT)]
    return [[*common, "--node-rank", str(host), script] for host in range(len(hosts))]


def train_alone() -> list[float]:
    """The script's training, by PyTorch and one process."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(64, 20, generator=generator), torch.randint(0, 3, (64,), generator=generator)
    for step in range(12):
        part = slice(step % 4 * 16, step % 4 * 16 + 16)
        optimizer.zero_grad()
        functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
    return [parameter.sum().item() for parameter in model.parameters()]


def read_first(ended: Sequence["subprocess.CompletedProcess[str]"]) -> dict[str, Any]:
    """What rank 0 printed, where all went well."""
    assert [one.returncode for one in ended] == [0, 0], "\n".join(one.stderr for one in ended)
    found: dict[str, Any] = json.loads(ended[0].stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["weft", "torchrun"])
@pytest.mark.parametrize(
    ("per_host", "plan", "group", "tolerance"),
    [(1, "data=2", "TorchGroup", 1e-5), (2, "data=4 compress=bf16", "HierarchicalGroup", 2e-2)],
)
def test_two_hosts_train_as_one_process_does(
    hosts: Hosts, script: str, launcher: str, per_host: int, plan: str, group: str, tolerance: float
) -> None:
    if launcher == "weft":
        commands, variables = weft(hosts, "--plan", plan, script), {}
    else:
        commands, variables = torchrun(hosts, per_host, script), {"WEFT_PLAN": plan}
    found = read_first(hosts.run_all(commands, variables, timeout=90))
    assert found["weights"] == pytest.approx(train_alone(), abs=tolerance)
    assert found["group"] == group
    assert found["total"] == (2 * per_host if launcher == "weft" else None)


@pytest.mark.slow
def test_servers_between_hosts_know_their_peers_by_a_secret_that_the_user_gives(
    hosts: Hosts, script: str, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text(f"{make_secret().hex()}\n")
    plan = ("--plan", "data=2 consistency=async topology=server(shards=2)")
    weights = read_first(hosts.run_all(weft(hosts, *plan, "--secret-file", str(secret), script)))["weights"]
    assert weights == pytest.approx(train_alone(), abs=2.0)  # the order of updates is nobody's, but training it is
    assert weights != train_alone()


@pytest.mark.slow
def test_the_error_of_one_rank_ends_all_hosts_and_is_told_on_each(hosts: Hosts, script: str) -> None:
    for ended in hosts.run_all(weft(hosts, "--workers", "4", script, "2"), timeout=90):
        assert ended.returncode == 3
        assert ended.stderr.splitlines()[-1] == "error: rank 2 of 4: ValueError: planted"


@pytest.mark.slow
def test_a_rank_that_exits_before_its_time_ends_all_hosts(hosts: Hosts, script: str) -> None:
    """Exit code 0 was no failure to tell: its host waited for the other without end, and that one for the rank."""
    for ended in hosts.run_all(weft(hosts, script, "exit", "1"), timeout=90):
        assert ended.returncode == 3
        assert "error: rank 1 of 2: ended with exit code 0 and no result" in ended.stderr


@pytest.mark.slow
def test_hosts_that_were_started_differently_say_so_and_nothing_else(hosts: Hosts, script: str) -> None:
    """Host 1 sometimes showed a traceback, and both a warning of torch that they have found no name for an address."""
    first, second = weft(hosts, "--workers", "2", script)[0], weft(hosts, "--workers", "4", script)[1]
    for ended in hosts.run_all([first, second], timeout=90):
        assert ended.returncode == 2
        (line,) = ended.stderr.splitlines()
        assert line.startswith("error: hosts were started differently (")
        assert "2 processes" in line
        assert "4 processes" in line


@pytest.mark.slow
def test_a_host_that_does_not_come_is_told(hosts: Hosts, script: str) -> None:
    commands = weft(hosts, "--timeout", "0.5", script)
    first, second = hosts.run_all([commands[0], ["true"]])[0], hosts.run_all([["true"], commands[1]])[1]
    assert (first.returncode, second.returncode) == (2, 2)
    assert "(came: 1 of 2, missing: 1); start the same command there, with --host-rank 1" in first.stderr
    assert "host 0 did not answer within 0.5 s" in second.stderr
