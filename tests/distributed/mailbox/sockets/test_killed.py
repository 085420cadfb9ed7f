"""Processes that are killed in the middle of sending: the others name them, go on, and take them back."""

import os
from pathlib import Path

import pytest
import torch

from weft.distributed.mailbox import JOINED, LEFT, AbstractMailbox, MailboxKind, open_mailbox
from weft.engines.fork_server import ForkedRank, fork_rank
from weft.engines.rank_program import RankProgram
from weft.errors import PeerLostError
from weft.secret import make_secret, write_secret

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["tcp", "shared_memory"])
def test_a_peer_killed_while_it_sends_is_named_and_may_return(kind: MailboxKind, tmp_path: Path) -> None:
    write_secret(tmp_path, make_secret())
    server, bystander = open_mailbox(kind, tmp_path, 0), open_mailbox(kind, tmp_path, 2)
    server.follow_peers()
    try:
        incarnations = []
        for _ in range(2):
            incarnations.append(serve_one_who_is_killed(server, kind, tmp_path))
            bystander.send(0, "still here")
            assert server.receive("still here", 2).source == 2
        assert sorted(set(incarnations)) == incarnations
    finally:
        bystander.close()
        server.close()


def serve_one_who_is_killed(server: AbstractMailbox, kind: MailboxKind, folder: Path) -> int:
    soon = server.clock.now() + 60
    process = start(kind, folder)
    try:
        incarnation = server.receive(JOINED, 1, deadline=soon).incarnation
        for _ in range(5):
            (gradient,) = server.receive("push", 1, deadline=soon).tensors
            assert torch.equal(gradient, torch.ones(500_000))
    finally:
        process.kill()
        process.wait()
    assert server.receive(LEFT, deadline=soon).header["reason"] == "it died"
    with pytest.raises(PeerLostError, match="peer 1 is lost") as lost:
        server.send(1, "weights")
    assert lost.value.peer == 1
    return incarnation


def start(kind: str, folder: Path) -> ForkedRank:
    program = folder / "program"
    program.mkdir(exist_ok=True)
    RankProgram("tests.distributed.mailbox.sockets.killed_peer:main", {"folder": str(folder), "kind": kind}).write(
        program
    )
    forked = fork_rank(program, {**os.environ, "WEFT_RANK": "1", "OMP_NUM_THREADS": "1"})
    assert forked is not None, "the fork server does not work here"
    return forked
