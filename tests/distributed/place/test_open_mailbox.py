"""Mailboxes of the ranks of a run, opened from their place."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes.launchers import mpirun, run_launched, torchrun
from weft.distributed.mailbox import AbstractMailbox
from weft.distributed.place import Launch, find_launch, open_group, open_launched_mailbox, open_mailbox, open_store
from weft.engines.local import run_ranks
from weft.engines.rank_program import RankProgram
from weft.errors import UsageError
from weft.secret import make_secret, write_secret


def talk(server: AbstractMailbox, worker: AbstractMailbox) -> None:
    worker.await_peers({server.address}, worker.clock.now() + 10)
    worker.send(server.address, "push", {"step": 1}, [torch.ones(3)])
    assert server.receive("push").source == worker.address
    worker.close()
    server.close()


@pytest.mark.parametrize("kind", ["auto", "tcp"])
def test_ranks_and_a_server_beside_them_meet_in_the_folder_of_the_run(tmp_path: Path, kind: str) -> None:
    write_secret(tmp_path, make_secret())
    places = [Launch("weft", rank, 2, str(tmp_path), 2) for rank in range(2)]
    server = open_launched_mailbox(places[0], kind, address=2, known=range(3))  # type: ignore[arg-type]
    talk(server, open_launched_mailbox(places[1], kind))  # type: ignore[arg-type]


def test_a_run_without_a_secret_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_SECRET", raising=False)
    with pytest.raises(UsageError, match="there is no secret"):
        open_launched_mailbox(Launch("weft", 0, 2, str(tmp_path), 2))


def test_ranks_that_share_no_folder_meet_through_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    c10d: Any = torch.distributed  # its type stubs lack the stores
    store = c10d.HashStore()
    monkeypatch.setattr(open_mailbox, "open_store", lambda place, timeout: store)
    monkeypatch.setenv("WEFT_SECRET", make_secret().hex())
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    places = [Launch("torchrun", rank, 2, "h:1", 1) for rank in range(2)]
    talk(open_launched_mailbox(places[0]), open_launched_mailbox(places[1]))


def test_shared_memory_is_for_one_host_and_tcp_needs_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    apart = Launch("torchrun", 0, 2, "h:1", 1)
    with pytest.raises(UsageError, match="shared memory joins ranks of one host"):
        open_launched_mailbox(apart, "shared_memory")
    with pytest.raises(UsageError, match="GLOO_SOCKET_IFNAME"):
        open_launched_mailbox(apart)


def rank_program() -> float:
    place = find_launch()
    mailbox = open_launched_mailbox(place)
    mailbox.await_peers(range(place.size), mailbox.clock.now() + 30)
    if place.rank == 0:
        total = sum(float(mailbox.receive("push").tensors[0].sum()) for _ in range(place.size - 1))
        for peer in mailbox.peers():
            mailbox.send(peer, "total", {"total": total})
    else:
        mailbox.send(0, "push", {}, [torch.full((20_000,), float(place.rank))])
        total = mailbox.receive("total", 0).header["total"]
    mailbox.close()
    return total


@pytest.mark.slow
def test_ranks_of_a_run_have_a_secret_and_talk() -> None:
    assert run_ranks(RankProgram("tests.distributed.place.test_open_mailbox:rank_program", {}), 2) == [20_000.0] * 2


def talk_from_one_rank_to_all(num_extra: int) -> list[int]:
    """Rank 0 has more addresses than the others; who is known at each address of this process."""
    place = find_launch()
    addresses = [place.rank, *(range(place.size, place.size + num_extra) if place.rank == 0 else [])]
    known = range(place.size + num_extra)
    mailboxes = [open_launched_mailbox(place, address=address, known=known) for address in addresses]
    for mailbox in mailboxes:
        mailbox.await_peers(set(known) - {mailbox.address}, mailbox.clock.now() + 30)
    found = [1 + len(mailbox.peers()) for mailbox in mailboxes]
    group = open_group(place, generation=1)
    group.barrier()  # nobody leaves before all have met
    group.close()
    for mailbox in mailboxes:
        mailbox.close()
    return found


@pytest.mark.parametrize("command", [torchrun(2), mpirun(2, "-x", "WEFT_SECRET")], ids=["torchrun", "mpirun"])
def test_a_process_with_more_addresses_than_others(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, each mailbox of a process that mpirun had started was in a store of its own, and nobody met."""
    pytest.importorskip("mpi4py")
    monkeypatch.setenv("WEFT_SECRET", make_secret().hex())
    program = "tests.distributed.place.test_open_mailbox:talk_from_one_rank_to_all"
    assert run_launched(command, program, 2, num_extra=2)[0] == [[4, 4, 4], [4]]


def test_ranks_started_by_hand_meet_at_rank_0_more_than_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    places = [Launch("torchrun", rank, 2, f"127.0.0.1:{port}", 2) for rank in range(2)]
    for number, place in enumerate([places[0], places[1], places[0]]):
        open_store(place, 10.0).set(str(number), "told")
        assert open_store(places[1], 10.0).get(str(number)) == b"told"
