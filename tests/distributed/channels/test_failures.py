"""Processes that cannot begin: every mailbox that was opened on the way is closed, and nobody is waited for."""

import pytest

from weft.distributed.mailbox import AbstractMailbox, LocalTransport
from weft.distributed.place import Launch, LaunchedPlace, launched
from weft.distributed.realise import RunSpec, realise
from weft.errors import UsageError
from weft.training.optimizers import SGD, Optimizer


@pytest.mark.parametrize(
    ("plan", "num_opened"),
    [
        ("data=2 consistency=async topology=server(shards=2)", 1),  # its server, then its worker
        ("data=2 consistency=async topology=server(1,inner=2)", 1),  # a server, then a host server
        ("data=2 consistency=async topology=server(1,inner=2)", 2),
        ("data=2 consistency=gossip(mix=pair)", 1),  # its responder, then its worker
    ],
)
def test_a_mailbox_that_cannot_be_opened(plan: str, num_opened: int, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[AbstractMailbox] = []
    transport = LocalTransport()

    def open_some(_launch: Launch, *, address: int, known: range) -> AbstractMailbox:
        if len(opened) == num_opened:
            raise UsageError("no more")
        opened.append(transport.open(address))
        return opened[-1]

    monkeypatch.setattr(launched, "open_launched_mailbox", open_some)
    spec = RunSpec(Optimizer(SGD(), lr=0.1))
    with pytest.raises(UsageError, match="no more"), realise(plan, LaunchedPlace(Launch("mpirun", 0, 2)), spec):
        pass
    assert len(opened) == num_opened
    for mailbox in opened:
        with pytest.raises(UsageError, match="is closed"):
            mailbox.receive()
