"""Ranks as processes: results in order, the first failure told first, and nothing left behind."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engines.contract import is_running, program, read_pids, wait_for_end
from weft.engines import local
from weft.engines.failure import Failure, find_cause
from weft.engines.local import Tolerance, reserve_port, run_ranks, threads_per_rank
from weft.engines.meeting import use_meeting_folder
from weft.engines.rank_program import RankProgram
from weft.errors import RankFailedError

DEADLINE_SECONDS = 20


@pytest.fixture(autouse=True)
def no_folder_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever happens to the ranks, the launcher removes their meeting folder."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert list(folder.iterdir()) == []


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


@contextmanager
def use_launcher(function: str, num_ranks: int, pipe: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.processes.plain", function, str(num_ranks), str(pipe)]
    environment = {**os.environ, "TMPDIR": str(pipe.parent)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("how", "text", "exit_code"),
    [
        ("value", "rank 1 of 3: ValueError: seven is not six", 3),
        ("usage", "rank 1 of 3: no such thing", 2),
        ("exit", "rank 1 of 3: ended with exit code 7", 7),
        ("exit without result", "rank 1 of 3: ended with exit code 0 and no result", 3),
    ],
)
def test_the_failure_shown_is_the_cause_and_not_a_witness(how: str, text: str, exit_code: int) -> None:
    with pytest.raises(RankFailedError, match=text) as failure:
        run_ranks(program("fail", rank=1, how=how), 3)
    assert (failure.value.rank, failure.value.exit_code) == (1, exit_code)
    assert ("ValueError: seven is not six" in failure.value.rank_traceback) == (how == "value")


def test_an_unknown_program_is_told_by_its_rank() -> None:
    with pytest.raises(RankFailedError, match=r"rank 0 of 1: .*nothing_here"):
        run_ranks(RankProgram("tests.processes.plain:nothing_here", {}), 1)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named_and_ends_all(victim: int, pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others, which notice nothing, are ended too, and are not blamed for it."""
    monkeypatch.setattr(local, "GRACE_SECONDS", 0.1)
    pids: dict[int, int] = {}

    def kill_one() -> None:
        pids.update(read_pids(pipe, 3))
        os.kill(pids[victim], signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    with pytest.raises(RankFailedError, match=f"rank {victim} of 3: ended by SIGKILL") as failure:
        run_ranks(program("wait_for_signal", pipe=str(pipe)), 3)
    killer.join()
    assert failure.value.rank == victim
    assert not any(map(is_running, pids.values()))


def test_a_killed_rank_is_done_without_only_if_the_others_know_it() -> None:
    """They would hear of no death of one that they do not know, and wait for it for ever."""
    tolerance = Tolerance(expendable=frozenset({1}))
    assert run_ranks(program("die", joins=True), 2, tolerance=tolerance) == ["done", None]
    with pytest.raises(RankFailedError, match="rank 1 of 2: ended by SIGKILL before the others knew it"):
        run_ranks(program("die", joins=False), 2, tolerance=tolerance)


def test_an_interrupt_ends_all_ranks(pipe: Path) -> None:
    with use_launcher("wait_for_signal", 2, pipe) as launcher:
        pids = read_pids(pipe, 2)
        launcher.send_signal(signal.SIGINT)
        assert launcher.communicate(timeout=DEADLINE_SECONDS)[0] == "interrupted\n"
    assert not any(map(is_running, pids.values()))
    assert not list(pipe.parent.glob("weft-ranks-*"))


def test_an_interrupt_reaches_the_first_rank_that_is_still_there(pipe: Path) -> None:
    def interrupt() -> None:
        wait_for_end(read_pids(pipe, 2)[0])
        os.kill(os.getpid(), signal.SIGINT)

    other_hand = threading.Thread(target=interrupt)
    other_hand.start()
    assert run_ranks(program("stop_when_interrupted", pipe=str(pipe)), 2) == ["done", "stopped"]
    other_hand.join()


def test_ranks_die_with_a_launcher_that_is_killed(pipe: Path) -> None:
    with use_launcher("wait_for_signal", 2, pipe) as launcher:
        pids = read_pids(pipe, 2)
        launcher.kill()
        for pid in pids.values():
            wait_for_end(pid)


def test_ranks_can_be_started_from_any_thread() -> None:
    """Signals are the main thread's business; asking for them elsewhere is an error in Python."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.extend(run_ranks(program("tell", word="aside"), 1)))
    thread.start()
    thread.join()
    assert len(results) == 1


def test_the_cause_is_the_first_that_is_no_witness() -> None:
    def failure(rank: int, moment: float, is_witness: bool) -> Failure:
        return Failure(rank, moment, "", "", "", 3, is_witness)

    assert find_cause([failure(0, 1.0, True), failure(1, 3.0, False), failure(2, 2.0, False)]).rank == 2
    assert find_cause([failure(0, 2.0, True), failure(1, 1.0, True)]).rank == 1


def test_every_rank_has_the_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what a program brings along, which goes before all others."""
    monkeypatch.setenv("RANK", "7")  # of a launch around this one
    known = RankProgram("tests.processes.plain:tell_variables", {}, {"OWN": "1", "GROUP_RANK": "5"})
    ranks = run_ranks(known, 2)
    assert [rank["RANK"] for rank in ranks] == [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1"]
    for rank in ranks:
        assert [rank[key] for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OWN")] == ["2", "2", "5", "1"]
        assert (rank["MASTER_ADDR"], rank["MASTER_PORT"]) == ("127.0.0.1", ranks[0]["MASTER_PORT"])


def test_launches_at_the_same_time_have_ports_of_their_own_which_ranks_can_use() -> None:
    with reserve_port() as first, reserve_port() as second:
        port = first.getsockname()[1]
        assert port != second.getsockname()[1]
        with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
            pass


def test_threads_are_shared_among_ranks() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_per_rank(1, {}) == cores
    assert threads_per_rank(100 * cores, {}) == 1


@pytest.mark.parametrize(("given", "number"), [("3", 3), ("3,2", 3), ("", None), ("0", None), ("many", None)])
def test_threads_that_the_user_asks_for_are_given(given: str, number: int | None) -> None:
    assert threads_per_rank(1, {"OMP_NUM_THREADS": given}) == (number or len(os.sched_getaffinity(0)))


def test_a_rank_computes_with_the_threads_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert run_ranks(RankProgram("torch:get_num_threads", {}), 2) == [3, 3]


def test_everyone_can_be_interrupted(pipe: Path) -> None:
    """Ranks of a script do not tell each other to stop."""

    def interrupt() -> None:
        read_pids(pipe, 2)
        os.kill(os.getpid(), signal.SIGINT)

    other_hand = threading.Thread(target=interrupt)
    other_hand.start()
    stopped = run_ranks(program("stop_each_when_interrupted", pipe=str(pipe)), 2, interrupts_all=True)
    assert stopped == ["stopped", "stopped"]
    other_hand.join()


def test_ranks_that_fail_for_reasons_of_their_own_have_a_line_each() -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 of 3: KeyError: 'b'$") as failure:
        run_ranks(program("fail_each_in_its_way"), 3)
    first, *_, other, last = failure.value.shown.splitlines()
    assert first == "Traceback (most recent call last):" and other == "KeyError: 'b'"
    assert re.fullmatch(r"rank 2: ValueError: c \(.*plain.py:\d+\)", last)  # and not rank 0, a witness


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_killed_leaves_no_folder(how: signal.Signals, pipe: Path) -> None:
    """Once the run's secret stayed in it. The fork server sees that its launcher is gone."""
    with use_launcher("wait_for_signal", 2, pipe) as launcher:
        read_pids(pipe, 2)
        (server,) = map(int, Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split())
        assert list(pipe.parent.glob("weft-ranks-*/secret"))
        launcher.send_signal(how)
        wait_for_end(server)
    assert not list(pipe.parent.glob("weft-ranks-*"))


def test_a_folder_that_was_left_behind_is_removed_by_the_next_launch() -> None:
    """Not one whose launcher lives."""
    root = Path(tempfile.gettempdir())
    abandoned, begun = root / "weft-ranks-abandoned", root / "weft-ranks-begun"
    for folder, file in ((abandoned, "owner"), (begun, "secret")):
        folder.mkdir()
        (folder / file).touch()
    with use_meeting_folder() as alive:
        run_ranks(program("tell", word="next"), 1)
        assert sorted(root.iterdir()) == sorted([alive, begun])
    shutil.rmtree(begun)
