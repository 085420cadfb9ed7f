"""Launchers of several hosts: they meet, tell each other how ranks failed, and end together. Here all on loopback."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engines.contract import DEADLINE_SECONDS, program
from weft.engines import host_notes, hosts, local
from weft.engines.engine import run_on
from weft.engines.failure import describe
from weft.engines.host_notes import HostNotes, Note, RankFailure, meet
from weft.engines.hosts import HostsEngine
from weft.engines.local import rank_variables
from weft.engines.rendezvous import Rendezvous, keep_store, reach_store
from weft.errors import RankFailedError, UsageError


def on_each(call: Callable[[int], Any], num_hosts: int = 2) -> list[Any]:
    """What the call gives, or raises, on each host, all at the same time."""
    answers: list[Any] = [None] * num_hosts

    def run(host: int) -> None:
        try:
            answers[host] = call(host)
        except (RankFailedError, UsageError) as error:
            answers[host] = error

    threads = [threading.Thread(target=run, args=(host,), daemon=True) for host in range(num_hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a host waits without end"
    return answers


def test_a_note_reads_back_with_its_failures() -> None:
    failure = RankFailure(3, 3, 1.5, describe(ValueError("planted"), 3))
    for note in (Note("train.py"), Note("train.py", "ended", 7, (failure, RankFailure(2, -9, 1.0)))):
        assert Note.decode(note.encode()) == note


def test_hosts_that_were_started_differently_are_told_so_on_each(rendezvous: Callable[..., Rendezvous]) -> None:
    for error in on_each(lambda host: meet(rendezvous(host), f"plan: data={host + 2}")):
        assert isinstance(error, UsageError)
        assert "hosts were started differently" in str(error)
        assert "plan: data=2" in str(error)
        assert "plan: data=3" in str(error)


def test_host_0_keeps_the_store_until_all_have_read_that_they_were_started_differently(
    rendezvous: Callable[..., Rendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host 0 saw the difference and ended. Host 1 then read from a store that was gone: "this is a bug in Weft"."""
    acts = [("host/1", Note("plan: data=4").encode()), ("parted/1", "")]

    def act(_seconds: float) -> None:
        """What host 1 does, one act each time that host 0 waits."""
        if acts:
            reach_store(rendezvous(1), time.monotonic()).set(*acts.pop(0))

    monkeypatch.setattr(host_notes, "PART_SECONDS", 60.0)
    monkeypatch.setattr(host_notes, "time", SimpleNamespace(monotonic=time.monotonic, sleep=act))
    with pytest.raises(UsageError, match="hosts were started differently"):
        meet(rendezvous(0), "plan: data=2")
    assert acts == []


def test_hosts_that_were_told_different_numbers_of_hosts_name_the_difference(
    rendezvous: Callable[..., Rendezvous],
) -> None:
    """Host 1 waited for a host 2 that host 0 did not know of, until the store was gone."""
    for error in on_each(lambda host: meet(rendezvous(host, num_hosts=host + 2), f"{host + 2} hosts")):
        assert isinstance(error, UsageError)
        assert "hosts were started differently" in str(error)


def test_a_number_that_another_host_has_is_refused(rendezvous: Callable[..., Rendezvous]) -> None:
    keeper = keep_store(rendezvous(0))
    keeper.add("came/1", 1)
    with pytest.raises(UsageError, match=r"another host has the same number \(--host-rank: 1\)"):
        meet(rendezvous(1), "train.py")


def test_hosts_that_do_not_come_are_counted(rendezvous: Callable[..., Rendezvous]) -> None:
    with pytest.raises(UsageError, match=r"within 0\.1 s \(came: 1 of 3, missing: 1, 2\)"):
        meet(rendezvous(0, num_hosts=3, timeout=0.1), "train.py")


def test_all_hosts_that_came_count_those_that_did_not(rendezvous: Callable[..., Rendezvous]) -> None:
    """Host 0, which came first, gave up first, and host 1 then asked a store that was gone."""
    keeper = keep_store(rendezvous(0))
    keeper.set("host/0", Note("train.py").encode())
    keeper.set(host_notes.OVER, "")
    (error,) = on_each(lambda _: meet(rendezvous(1, num_hosts=3, timeout=1e6), "train.py"), 1)
    assert isinstance(error, UsageError)
    assert "came: 2 of 3, missing: 2" in str(error)


def test_a_launcher_that_gives_no_sign_of_life_is_lost(
    rendezvous: Callable[..., Rendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    both: list[HostNotes] = on_each(lambda host: meet(rendezvous(host), "train.py"))
    assert [notes.find_lost() for notes in both] == [None, None]
    both[1].close()  # as one that was killed: its note stands still, and does not say that it has ended
    monkeypatch.setattr(host_notes, "SILENCE_SECONDS", 0.0)
    while both[0].find_lost() is None:
        time.sleep(0.01)
    found = both[0].find_lost()
    assert found is not None
    assert found[0] == 1
    both[0].close()


def test_every_rank_of_every_host_knows_its_place() -> None:
    told = [rank_variables(rank, 4, 29500, address="10.0.0.1", num_hosts=2) for rank in range(4)]
    assert [(one["RANK"], one["LOCAL_RANK"], one["GROUP_RANK"]) for one in told] == [
        ("0", "0", "0"),
        ("1", "1", "0"),
        ("2", "0", "1"),
        ("3", "1", "1"),
    ]
    assert {(one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"], one["MASTER_ADDR"]) for one in told} == {
        ("4", "2", "10.0.0.1")
    }
    assert {one["TORCHELASTIC_USE_AGENT_STORE"] for one in told} == {"True"}


def test_ranks_that_cannot_be_dealt_out_evenly_are_refused(rendezvous: Callable[..., Rendezvous]) -> None:
    with pytest.raises(UsageError, match="different numbers of ranks"):
        HostsEngine(rendezvous(0), "train.py").start(Path("/nowhere"), 3)


@pytest.mark.slow
def test_each_host_runs_its_own_ranks(rendezvous: Callable[..., Rendezvous]) -> None:
    first, second = on_each(lambda host: run_on(HostsEngine(rendezvous(host), "tell"), program("tell", word="weft"), 4))
    assert [result and (result["rank"], result["size"]) for result in first] == [(0, 4), (1, 4), None, None]
    assert [result and (result["rank"], result["size"]) for result in second] == [None, None, (2, 4), (3, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("value", "ValueError: seven is not six"),
        ("exit", "ended with exit code 7"),
        # Was no failure for other hosts, which waited for ever.
        ("exit without result", "ended with exit code 0 and no result"),
    ],
)
def test_the_failure_of_one_rank_is_told_on_every_host(
    rendezvous: Callable[..., Rendezvous], how: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of the other host that wait for the lost one, and do not notice, are ended."""
    monkeypatch.setattr(hosts, "AGREE_SECONDS", 30.0)
    monkeypatch.setattr(local, "GRACE_SECONDS", 0.1)
    failing = program("fail", rank=1, how=how)
    for error in on_each(lambda host: run_on(HostsEngine(rendezvous(host), "fail"), failing, 2)):
        assert isinstance(error, RankFailedError)
        assert (error.rank, str(error).splitlines()[0].partition(";")[0]) == (1, f"rank 1 of 2: {text}")
