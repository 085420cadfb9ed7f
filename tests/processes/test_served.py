"""Servers and workers as real processes: replays to the last bit, and deaths by kill -9."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import Weft
from tests.processes.killing import DEADLINE, kill_when_under_way, use_killer, wait_until
from weft.distributed.consistency.server import read_decisions, read_summary
from weft.errors import RunFolderError
from weft.proving.audit import audit_arrival
from weft.records.record_file import read_record

SETTINGS = ["--set", "epochs=2", "--set", "batch_size=64", "--quiet"]
SIMULATED = ["--compute-seconds", "0.001", "--quiet"]


@pytest.mark.slow
def test_a_run_of_four_processes_is_replayed_to_the_last_bit(weft: Weft, tmp_path: Path) -> None:
    """On real processes again, and on the virtual cluster."""
    first = tmp_path / "first"
    plan = "data=4 consistency=async topology=server(shards=2)"
    weft("run", "digits_mlp", "--plan", plan, *SETTINGS, "--out", first)
    assert "to the last bit" in weft("run", "--replay", first, "--quiet", "--out", tmp_path / "again").err
    assert "to the last bit" in weft("simulate", "--replay", first, *SIMULATED, "--json").err
    repetition = read_record(first).repetitions[0]
    summary = read_summary(first, 0, 0)
    assert summary is not None
    assert repetition.series["staleness"] == tuple(map(float, summary.staleness))
    assert audit_arrival(read_decisions(first, 0, 0), 4) == []


@pytest.mark.slow
def test_servers_without_slack_end_with_the_bits_of_synchronous_processes(weft: Weft, tmp_path: Path) -> None:
    """Four real processes of every kind, and four virtual ranks that add in the order of ranks."""
    plans = {
        "run": ("data=4", "data=4 topology=direct", "data=4 consistency=stale(0) topology=server(shards=2)"),
        "simulate": ("data=4 topology=direct", "data=4 consistency=backup(0) topology=server"),
    }
    found = set()
    for command, texts in plans.items():
        given = ["--compute-seconds", "0.001"] if command == "simulate" else []
        for number, plan in enumerate(texts):
            out = tmp_path / f"{command}-{number}"
            weft(command, "digits_mlp", "--plan", plan, *SETTINGS, *given, "--out", out)
            found.add(read_record(out).repetitions[0].hashes["parameters"])
    assert len(found) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "data=3 consistency=elastic(2) topology=server(shards=1,place=own)",
        "data=4 consistency=async topology=server(shards=2,inner=3)",
    ],
    ids=["elastic", "host servers"],
)
def test_elastic_ranks_and_host_servers_are_replayed_to_the_last_bit(plan: str, weft: Weft, tmp_path: Path) -> None:
    """Real processes once, and their record on the virtual cluster."""
    first = tmp_path / "first"
    weft("run", "digits_mlp", "--plan", plan, *SETTINGS, "--out", first)
    assert "to the last bit" in weft("simulate", "--replay", first, *SIMULATED, "--json").err


@pytest.mark.slow
def test_a_worker_and_a_server_that_are_killed(weft: Weft, tmp_path: Path) -> None:
    """The worker is done without; the server is restored from its last snapshot, and says what was lost."""
    run = tmp_path / "run"
    plan = "data=3 consistency=async topology=server(shards=1,place=own)"
    settings = ["--set", "epochs=4", "--set", "batch_size=32", "--quiet"]
    with use_killer(run, 1, server=3):
        weft("run", "digits_mlp", "--plan", plan, *settings, "--out", run)
    (repetition,) = read_record(run).repetitions
    assert repetition.status == "done"
    lines = [json.loads(line) for line in (run / "decisions/seed-0/shard-0.jsonl").read_text().splitlines()]
    assert any(isinstance(line, dict) and "restored" in line for line in lines)
    summary = read_summary(run, 0, 0)
    assert summary is not None and summary.lost > 0
    assert repetition.values["lost_updates"] == summary.lost


def has_returned(rank: int, journal: str) -> bool:
    """Whether a shard lost this rank, took it back, and has used a gradient of it since."""
    before, _, after = journal.partition(f'["join",{rank}]\n')
    return f'["leave",{rank}]' in before and f'["commit",[{rank},' in after


@pytest.mark.slow
def test_a_worker_that_is_killed_is_started_again(tmp_path: Path) -> None:
    """It gets the weights as they are then, and takes part until the end, which Ctrl-C brings to a process of its own,
    as a user starts it."""
    run = tmp_path / "run"
    plan = "data=3 consistency=async topology=server"
    settings = ["--set", "epochs=100000", "--set", "batch_size=32", "--quiet", "--restarts", "1"]
    command = [sys.executable, "-m", "weft", "run", "digits_mlp", "--plan", plan, *settings, "--out", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    journal = run / "decisions/seed-0/shard-0.jsonl"

    def goes_on() -> bool:
        return process.poll() is None

    try:
        kill_when_under_way(goes_on, run, 1)
        wait_until(lambda: has_returned(1, journal.read_text()), goes_on, "the worker did not return")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, errors.decode()
    summary = read_summary(run, 0, 0)
    assert summary is not None and summary.returned == 1
    with pytest.raises(RunFolderError, match="was lost and came back, which cannot be repeated"):
        read_decisions(run, 0, 0)
