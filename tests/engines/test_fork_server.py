"""Ranks that are forked: the same as new processes, never with old code of a user's, and never orphans."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.contract import program, read_pids, wait_for_end
from weft.engines import fork_server
from weft.engines.engine import run_on
from weft.engines.fork_server import find_fork_server, fork_rank, start_fork_server, stop_fork_server
from weft.engines.local import LocalEngine, run_ranks
from weft.engines.rank_program import RankProgram
from weft.errors import RankFailedError

STATE = RankProgram("tests.processes.process_state:tell_state", {})


@pytest.fixture
def own_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that kills the server has its own."""
    for name, value in {"_server": None, "_has_failed": False}.items():
        monkeypatch.setattr(fork_server, name, value)
    yield
    stop_fork_server()


def forked() -> list[bool]:
    """Whether two ranks that are started now are forked."""
    return [parent == find_fork_server() for parent in run_ranks(RankProgram("os:getppid", {}), 2)]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_forked_rank_is_what_a_new_process_is(num_ranks: int) -> None:
    """Threads, bits of products and convolutions, streams, signals, descriptors, paths, environment."""
    assert run_ranks(STATE, num_ranks) == run_on(LocalEngine(forks=False), STATE, num_ranks)


def test_generators_that_nobody_seeded_differ() -> None:
    first, second = run_ranks(RankProgram("tests.processes.process_state:tell_entropy", {}), 2)
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_the_server_is_kept_between_runs() -> None:
    assert forked() == [True, True]
    server = find_fork_server()
    assert forked() == [True, True]
    assert find_fork_server() == server


def test_nothing_but_weft_and_what_it_stands_on_is_loaded() -> None:
    """A user's module may change between two runs; a large package that a run may not need takes seconds."""
    (loaded,) = run_ranks(RankProgram("tests.processes.process_state:tell_packages", {}), 1)
    assert {"weft", "torch", "numpy"} <= set(loaded)
    assert not {"jax", "onnx", "onnxruntime", "transformers", "sklearn", "scipy", "pytest", "typer"} & set(loaded)


def test_a_module_that_was_changed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for answer in (1, 2):
        Path("theirs.py").write_text(f"def tell():\n    return {answer}\n")
        assert run_ranks(RankProgram("theirs:tell", {}), 1) == [answer]


def test_a_rank_has_the_variables_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_TEST", "now")
    assert run_ranks(RankProgram("os:getenv", {"key": "WEFT_TEST"}), 1) == ["now"]
    monkeypatch.delenv("WEFT_TEST")
    assert run_ranks(RankProgram("os:getenv", {"key": "WEFT_TEST"}), 1) == [None]


@pytest.mark.slow
def test_the_server_is_renewed_for_variables_that_are_read_at_the_start(
    own_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_fork_server()
    before = find_fork_server()
    monkeypatch.setenv("TORCH_TEST", "1")
    assert forked() == [True, True]
    assert find_fork_server() not in (None, before)


def test_no_rank_is_forked_where_the_user_sets_threads_himself(tmp_path: Path) -> None:
    assert fork_rank(tmp_path, {**os.environ, "MKL_NUM_THREADS": "2"}) is None


@pytest.mark.slow
def test_ranks_are_new_processes_where_the_server_is_dead(own_server: None, capfd: pytest.CaptureFixture[str]) -> None:
    """The user is told once."""
    start_fork_server()
    server = find_fork_server()
    assert server is not None
    os.kill(server, signal.SIGKILL)
    assert run_ranks(RankProgram("os:getppid", {}), 2) == [os.getpid()] * 2
    assert run_ranks(RankProgram("os:getppid", {}), 2) == [os.getpid()] * 2
    assert capfd.readouterr().err.count("notice: ranks start as new processes") == 1


@pytest.mark.slow
def test_ranks_die_with_the_server(own_server: None, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    pids: dict[int, int] = {}

    def kill_server() -> None:
        pids.update(read_pids(pipe, 2))
        server = find_fork_server()
        assert server is not None
        os.kill(server, signal.SIGKILL)

    killer = threading.Thread(target=kill_server)
    killer.start()
    with pytest.raises(RankFailedError, match="ended by SIGKILL"):
        run_ranks(program("wait_for_signal", pipe=str(pipe)), 2)
    killer.join()
    for pid in pids.values():
        wait_for_end(pid)


@pytest.mark.slow
def test_the_server_ends_with_its_launcher() -> None:
    """However the launcher ends."""
    code = (
        "import weft.engines.fork_server as f; f.start_fork_server(); print(f.find_fork_server(), flush=True); input()"
    )
    for end in (subprocess.Popen.kill, lambda process: process.stdin.close()):
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            server = int(process.stdout.readline())
            end(process)
        wait_for_end(server)


def test_ranks_that_have_ended_are_no_zombies() -> None:
    run_ranks(RankProgram("os:getpid", {}), 2)
    server: Any = find_fork_server()
    assert Path(f"/proc/{server}/task/{server}/children").read_text() == ""


def test_launchers_do_not_import_torch() -> None:
    """Nor do guards of ranks. Once the secret of a run lay with the mailbox, and each of them waited for torch."""
    modules = "weft.engines.local", "weft.engines.mpirun", "weft.engines.torchrun", "weft.engines.guarded_rank"
    program = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


@pytest.mark.slow
def test_variables_of_the_machine_that_set_no_threads_are_no_hindrance(
    own_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Regression: where OPENBLAS_CORETYPE was set, as some machines have it, every rank imported torch anew.
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    assert forked() == [True, True]
