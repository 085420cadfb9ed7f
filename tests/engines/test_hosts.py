"""Launchers of several hosts: they meet, tell each other how ranks failed, and end together. Here all on loopback."""

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.contract import program
from weft.engines import host_notes, hosts
from weft.engines.engine import run_on
from weft.engines.failure import describe
from weft.engines.host_notes import HostNotes, Note, RankFailure, Rendezvous, meet
from weft.engines.hosts import HostsEngine
from weft.engines.local import rank_variables
from weft.errors import RankFailedError, UsageError


@pytest.fixture
def rendezvous() -> Callable[..., Rendezvous]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return lambda host, num_hosts=2, timeout=30.0: Rendezvous("127.0.0.1", port, host, num_hosts, timeout)


def on_each(call: Callable[[int], Any], num_hosts: int = 2) -> list[Any]:
    """What the call gives, or raises, on each host, all at the same time."""
    answers: list[Any] = [None] * num_hosts

    def run(host: int) -> None:
        try:
            answers[host] = call(host)
        except (RankFailedError, UsageError) as error:
            answers[host] = error

    threads = [threading.Thread(target=run, args=(host,)) for host in range(num_hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@pytest.mark.parametrize("text", ["10.0.0.1", ":29500", "10.0.0.1:port", "10.0.0.1:70000"])
def test_a_rendezvous_is_an_address_and_a_port(text: str) -> None:
    with pytest.raises(UsageError, match=r"not an address and a port .* write it as 10\.0\.0\.1:29500"):
        Rendezvous.parse(text, 0, 2)


def test_hosts_count_from_zero() -> None:
    with pytest.raises(UsageError, match="no such host"):
        Rendezvous.parse("10.0.0.1:29500", 2, 2)


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


def test_a_number_that_another_host_has_is_refused(rendezvous: Callable[..., Rendezvous]) -> None:
    keeper = host_notes._keep_store(rendezvous(0))
    keeper.add("came/1", 1)
    with pytest.raises(UsageError, match=r"another host has the same number \(--host-rank: 1\)"):
        meet(rendezvous(1), "train.py")


def test_hosts_that_do_not_come_are_counted(rendezvous: Callable[..., Rendezvous]) -> None:
    with pytest.raises(UsageError, match=r"within 0\.1 s \(came: 1 of 3, missing: 1, 2\)"):
        meet(rendezvous(0, num_hosts=3, timeout=0.1), "train.py")


def test_host_0_listens_at_an_address_of_its_own() -> None:
    with pytest.raises(UsageError, match=r"host 0 cannot listen at 192\.0\.2\.1:29500"):
        meet(Rendezvous("192.0.2.1", 29500, 0, 2), "train.py")


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
    ("how", "text"), [("value", "ValueError: seven is not six"), ("exit", "ended with exit code 7")]
)
def test_the_failure_of_one_rank_is_told_on_every_host(
    rendezvous: Callable[..., Rendezvous], how: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of the other host that wait for the lost one, and do not notice, are ended."""
    monkeypatch.setattr(hosts, "AGREE_SECONDS", 30.0)
    failing = program("fail", rank=1, how=how)
    for error in on_each(lambda host: run_on(HostsEngine(rendezvous(host), "fail"), failing, 2)):
        assert isinstance(error, RankFailedError)
        assert (error.rank, str(error).splitlines()[0].partition(";")[0]) == (1, f"rank 1 of 2: {text}")
