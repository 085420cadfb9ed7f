"""The contract of engines, over all of them; and broken ones, which show that it can be broken."""

import os
import signal
from pathlib import Path
from typing import final

import pytest

from tests.engines import contract
from tests.engines.contract import Check
from weft.engines import command, local
from weft.engines.engine import AbstractEngine, AbstractRanks, End, Tolerance
from weft.engines.local import LocalEngine
from weft.engines.mpirun import MpirunEngine
from weft.engines.rank_program import log_of, read_process, stream_of
from weft.engines.torchrun import TorchrunEngine

ENGINES: dict[str, AbstractEngine] = {
    "forked": LocalEngine(),
    "local": LocalEngine(forks=False),
    "torchrun": TorchrunEngine(),
    "mpirun": MpirunEngine(),
}


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(command, "GRACE_SECONDS", 2.0)


@pytest.mark.slow
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_an_engine_keeps_the_contract(engine: AbstractEngine, check: Check, tmp_path: Path) -> None:
    check(engine, tmp_path)


@final
class BrokenEngine(AbstractEngine):
    """A sound engine with one fault."""

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def start(self, folder: Path, num_ranks: int) -> "BrokenRanks":
        if self._fault == "no logs":
            for rank in range(num_ranks):
                log_of(folder, rank).unlink(missing_ok=True)
                log_of(folder, rank).symlink_to(os.devnull)
        if self._fault in ("rank 0 is not shown", "rank 0 is not kept"):
            for stream in (stream_of(folder, 0, "out"), stream_of(folder, 0, "err")):
                stream.unlink()
                if self._fault == "rank 0 is not shown":
                    stream.symlink_to(os.devnull)
        return BrokenRanks(LocalEngine().start(folder, num_ranks), self._fault, folder)


@final
class BrokenRanks(AbstractRanks):
    def __init__(self, ranks: AbstractRanks, fault: str, folder: Path) -> None:
        self._ranks = ranks
        self._fault = fault
        self._folder = folder

    def wait(self, tolerance: Tolerance) -> list[End]:
        ends = self._ranks.wait(tolerance)
        if self._fault == "results mixed up":
            files = [self._folder / f"result-{rank}.json" for rank in (0, 1)]
            texts = [file.read_text() for file in files]
            for file, text in zip(files, reversed(texts), strict=True):
                file.write_text(text)
        return [] if self._fault == "ends unseen" else ends

    def interrupt(self, *, everyone: bool) -> None:
        if self._fault == "interrupt to another rank":
            process = read_process(self._folder, 1)
            assert process is not None
            os.kill(process, signal.SIGINT)
        else:
            self._ranks.interrupt(everyone=everyone)

    def end(self) -> None:
        self._ranks.end()


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("results mixed up", contract.give_results),
        ("ends unseen", contract.tell_cause),
        ("ends unseen", contract.tell_exit_code),
        ("ends unseen", contract.name_killed_rank),
        ("no logs", contract.keep_logs),
        ("rank 0 is not kept", contract.show_and_keep_rank_0),
        ("rank 0 is not shown", contract.show_and_keep_rank_0),
        ("interrupt to another rank", contract.pass_interrupt_on),
        ("ends unseen", contract.tell_interrupt),
    ],
)
def test_a_broken_engine_is_found(fault: str, check: Check, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(BrokenEngine(fault), tmp_path)
