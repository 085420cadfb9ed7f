"""The contract of mailboxes: what every kind must do, as programs that run on all peers and return what went wrong.

A program is a module-level function of a setup, so that any kind can start it, in threads, in processes or in virtual
time. It opens its mailbox itself, because peers come and go, and returns a list of problems: none is a pass.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.distributed.mailbox import JOINED, LEFT, AbstractMailbox, Message
from weft.errors import DeadlineError, PeerLostError, UsageError

PATIENCE = 10.0  # seconds that only a broken mailbox takes
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)


@dataclass(frozen=True)
class Setup:
    """What a peer starts with: its place among `size` peers, and a way to open its mailbox, also again."""

    address: int
    size: int
    open: Callable[[], AbstractMailbox]

    @property
    def others(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.address]


Program = Callable[[Setup], list[str]]
Runner = Callable[[Program, int], list[list[str]]]


def check_kind(program: Program, run: Runner, size: int) -> None:
    """Raise AssertionError where a kind of mailbox breaks the contract."""
    reports = run(program, size)
    assert len(reports) == size
    problems = [f"peer {peer}: {problem}" for peer, report in enumerate(reports) for problem in report]
    assert not problems, "\n".join(problems[:10])


class Findings:
    """Problems found by one peer."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def expect(self, what: str, got: Any, wanted: Any) -> None:
        if got != wanted:
            self.problems.append(f"{what}: got {got!r}, wanted {wanted!r}")

    def expect_tensor(self, what: str, got: Tensor, wanted: Tensor) -> None:
        if got.shape != wanted.shape or got.dtype != wanted.dtype or not torch.equal(got, wanted):
            self.problems.append(f"{what}: got {got.flatten()[:6]}, wanted {wanted.flatten()[:6]}")

    @contextmanager
    def raises(self, kind: type[Exception], text: str = "") -> Iterator[None]:
        try:
            yield
        except kind as error:
            if text not in str(error):
                self.problems.append(f"error says {error!s}, not {text!r}")
        else:
            self.problems.append(f"no {kind.__name__} ({text})")


@contextmanager
def everyone(setup: Setup) -> Iterator[AbstractMailbox]:
    """An open mailbox with all peers there, and none leaving before all are done."""
    mailbox = setup.open()
    mailbox.await_peers(range(setup.size), mailbox.clock.now() + PATIENCE)
    yield mailbox
    meet(setup, mailbox, "end of the program")
    mailbox.close()


def meet(setup: Setup, mailbox: AbstractMailbox, place: str) -> None:
    """A barrier of messages."""
    if setup.address == 0:
        for peer in setup.others:
            get(mailbox, place, peer)
        for peer in setup.others:
            mailbox.send(peer, place)
    else:
        mailbox.send(0, place)
        get(mailbox, place, 0)


def get(mailbox: AbstractMailbox, tag: str | tuple[str, ...] | None = None, source: int | None = None) -> Message:
    """Receive, with a deadline that only a broken mailbox meets."""
    return mailbox.receive(tag, source, deadline=mailbox.clock.now() + PATIENCE)


def any_source(setup: Setup) -> list[str]:
    found = Findings()
    with everyone(setup) as mailbox:
        found.expect("address", mailbox.address, setup.address)
        if setup.address == 0:
            messages = [get(mailbox, "push") for _ in range(5 * len(setup.others))]
            for peer in setup.others:
                steps = [message.header["step"] for message in messages if message.source == peer]
                found.expect(f"steps of {peer} in order", steps, [0, 1, 2, 3, 4])
            for message in messages:
                wanted = torch.full((3,), float(10 * message.source + message.header["step"]))
                found.expect_tensor("its tensor", message.tensors[0], wanted)
        else:
            gradient = torch.empty(3)
            for step in range(5):
                mailbox.send(0, "push", {"step": step}, [gradient.fill_(10 * setup.address + step)])
    return found.problems


def tags_and_order(setup: Setup) -> list[str]:
    """Everyone writes to everyone under two tags; each tag is read in its own order, whatever comes between."""
    found = Findings()
    with everyone(setup) as mailbox:
        works = [
            mailbox.start_send(peer, tag, {"number": number}, [torch.tensor(number)])
            for number in range(20)
            for tag in ("a", "b")
            for peer in setup.others
        ]
        # Peers in both orders: whichever comes first, one of them asks for the other before.
        for tag, peers in (("b", setup.others), ("a", setup.others[::-1])):
            for peer in peers:
                messages = [get(mailbox, tag, peer) for _ in range(20)]
                seen = [(message.source, int(message.tensors[0])) for message in messages]
                found.expect(f"order of {tag} from {peer}", seen, [(peer, number) for number in range(20)])
        for work in works:
            work.wait()
            work.wait()
            found.expect("a send that was waited for is done", work.is_done(), True)
        found.expect("nothing is left", mailbox.poll(("a", "b")), None)
    return found.problems


def _payloads() -> list[Tensor]:
    ramp = torch.arange(24.0).view(4, 6)
    shapes = [torch.ones(()), torch.empty(0), torch.empty(3, 0, 2), ramp.t(), ramp[:, ::2], torch.arange(300_000)]
    types = [(torch.arange(257) % 7).to(dtype) for dtype in DTYPES]
    return [*shapes, *types]


def payloads(setup: Setup) -> list[str]:
    found = Findings()
    header = {"text": "grüße", "list": [1, [2.5, None]], "flag": True, "deep": {"a": {}}, "large": 2**60}
    with everyone(setup) as mailbox:
        if setup.address == 0:
            for peer in setup.others:
                message = get(mailbox, "all", peer)
                found.expect("header", message.header, header)
                found.expect("number of tensors", len(message.tensors), len(_payloads()))
                for got, wanted in zip(message.tensors, _payloads(), strict=True):
                    found.expect_tensor(f"{tuple(wanted.shape)} {wanted.dtype}", got, wanted.contiguous())
                bare = get(mailbox, "bare", peer)
                found.expect("a bare message", (bare.header, bare.tensors), ({}, ()))
        else:
            mailbox.send(0, "all", header, _payloads())
            mailbox.send(0, "bare")
    return found.problems


def tensors_belong_to_their_side(setup: Setup) -> list[str]:
    """After a send is done its tensors may be changed; what was received may be changed too."""
    found = Findings()
    with everyone(setup) as mailbox:
        if setup.address == 1:
            tensor = torch.ones(5000)
            for value in range(4):
                mailbox.send(0, "value", {}, [tensor.fill_(value)])
            meet(setup, mailbox, "changed")
            found.expect_tensor("the sender's", tensor, torch.full((5000,), 3.0))
        elif setup.address == 0:
            for value in range(4):
                (tensor,) = get(mailbox, "value").tensors
                found.expect_tensor("the receiver's", tensor, torch.full((5000,), float(value)))
                tensor.fill_(-1)
            meet(setup, mailbox, "changed")
        else:
            meet(setup, mailbox, "changed")
    return found.problems


def tensors_of_empty(setup: Setup) -> list[str]:
    """Tensors of the mailbox's own are sent and received like others, to several peers at once."""
    found = Findings()
    with everyone(setup) as mailbox:
        tensor = mailbox.empty((50_000,))
        found.expect("form", (tensor.shape, mailbox.empty((2, 3), torch.int64).dtype), ((50_000,), torch.int64))
        for value in range(4):
            if setup.address == 0:
                works = [mailbox.start_send(peer, "weights", {}, [tensor.fill_(value)]) for peer in setup.others]
                for work in works:
                    work.wait()
            else:
                message = mailbox.receive("weights", 0, into=[tensor], deadline=mailbox.clock.now() + PATIENCE)
                found.expect_tensor("weights", message.tensors[0], torch.full((50_000,), float(value)))
                mailbox.send(0, "seen", {}, [tensor[:20_000]])
        for _ in range(4):
            for peer in setup.others if setup.address == 0 else ():
                found.expect("a part of it", get(mailbox, "seen", peer).tensors[0].shape, (20_000,))
    return found.problems


def receiving_into(setup: Setup) -> list[str]:
    """Tensors made ready are filled and handed back, before or after the message came; a misfit is kept."""
    found = Findings()
    with everyone(setup) as mailbox:
        size = 200_000
        if setup.address == 0:
            for is_early in (True, False):
                ready = [torch.zeros(size), torch.zeros(2, 3)[:, ::2]]
                work = mailbox.start_receive("weights", 1, into=ready) if is_early else None
                mailbox.send(1, "go")
                if work is None:
                    get(mailbox, "sent", 1)
                    work = mailbox.start_receive("weights", 1, into=ready)
                message = work.wait(mailbox.clock.now() + PATIENCE)
                found.expect_tensor("large", ready[0], torch.arange(float(size)))
                found.expect_tensor("with gaps", ready[1], torch.ones(2, 2))
                found.expect("handed back", [t.data_ptr() for t in message.tensors], [t.data_ptr() for t in ready])
                found.expect("again", work.wait() is message, True)
            mailbox.send(1, "go")
            get(mailbox, "sent", 1)
            get(mailbox, "sent", 1)
            with found.raises(UsageError, "does not fit"):
                mailbox.receive("weights", 1, into=[torch.zeros(7)])
            found.expect("kept", len(get(mailbox, "weights", 1).tensors), 2)
        elif setup.address == 1:
            for _ in range(3):
                get(mailbox, "go", 0)
                mailbox.send(0, "weights", {}, [torch.arange(float(size)), torch.ones(2, 2)])
                mailbox.send(0, "sent")
    return found.problems


def deadlines(setup: Setup) -> list[str]:
    found = Findings()
    with everyone(setup) as mailbox:
        for source, names in ((None, setup.others), (setup.others[0], setup.others[:1])):
            for moment in (-math.inf, mailbox.clock.now() + 0.01):
                try:
                    mailbox.receive("never", source, deadline=moment)
                    found.expect("a message that nobody sent", True, False)
                except DeadlineError as error:
                    found.expect("who was waited for", error.peers, tuple(names))
                    found.expect("the error names them", ", ".join(map(str, names)) in str(error), True)
        found.expect("poll", mailbox.poll("never"), None)
        with found.raises(DeadlineError, "missing: [77]"):
            mailbox.await_peers({77}, mailbox.clock.now() + 0.01)
        work = mailbox.start_receive("late", setup.others[0])
        with found.raises(DeadlineError, "late"):
            work.wait(mailbox.clock.now() + 0.01)
        meet(setup, mailbox, "all have waited")
        for peer in setup.others:
            mailbox.send(peer, "late")
        found.expect("comes after all", work.wait(mailbox.clock.now() + PATIENCE).source, setup.others[0])
    return found.problems


def cancelling(setup: Setup) -> list[str]:
    """A receive that is cancelled keeps nothing: what came for it goes to whoever asks next, in its place."""
    found = Findings()
    with everyone(setup) as mailbox:
        if setup.address == 0:
            receives = [mailbox.start_receive(tag) for tag in ("a", "b", "c")]
            for tag in ("b", "c", "d"):
                mailbox.send(1, "send", {"tag": tag})
                get(mailbox, "sent", 1)
            found.expect("which are done", [receive.is_done() for receive in receives], [False, True, True])
            found.expect("and is here", receives[1].wait().tag, "b")
            for receive in receives:
                receive.cancel()
            found.expect("c was before d", [get(mailbox, ("a", "c", "d")).tag for _ in range(2)], ["c", "d"])
            with found.raises(DeadlineError, "tag: a"):
                receives[0].wait(mailbox.clock.now() + 0.01)
        elif setup.address == 1:
            for _ in range(3):
                mailbox.send(0, get(mailbox, "send", 0).header["tag"])
                mailbox.send(0, "sent")
    return found.problems


def fairness(setup: Setup) -> list[str]:
    """What has arrived first is handed out first: peer 1 writes much, and peer 2 is not kept waiting."""
    found = Findings()
    with everyone(setup) as mailbox:
        if setup.address == 0:
            for peer in (2, 1):
                mailbox.send(peer, "go")
                get(mailbox, "sent", peer)
            order = [get(mailbox, ("push", "pull")).source for _ in range(7)]
            found.expect("order of arrival", order, [2, *[1] * 6])
        elif setup.address in (1, 2):
            get(mailbox, "go", 0)
            for number in range(6 if setup.address == 1 else 1):
                mailbox.send(0, "push" if number % 2 or setup.address == 1 else "pull")
            mailbox.send(0, "sent")
    return found.problems


def own_messages(setup: Setup) -> list[str]:
    found = Findings()
    with everyone(setup) as mailbox:
        tensor = torch.ones(3)
        mailbox.send(setup.address, "self", {"a": 1}, [tensor])
        tensor.zero_()
        message = get(mailbox, "self", setup.address)
        found.expect("source", (message.source, message.incarnation), (setup.address, mailbox.incarnation))
        found.expect_tensor("tensor", message.tensors[0], torch.ones(3))
        found.expect("others alone", sorted(mailbox.peers()), setup.others)
    return found.problems


def leaving_and_returning(setup: Setup) -> list[str]:
    """Peer 1 goes and comes back; peer 0 follows; peer 2 waits for peer 1 alone."""
    found = Findings()
    mailbox = setup.open()
    soon = mailbox.clock.now() + PATIENCE
    mailbox.await_peers(range(setup.size), soon)
    if setup.address == 1:
        mailbox.send(0, "last", {}, [torch.ones(100_000)])
        mailbox.send(2, "last")
        get(mailbox, "leave", 0)
        mailbox.close()
        mailbox = setup.open()
        mailbox.await_peers({0, 2}, soon)
        get(mailbox, "welcome", 0)
        mailbox.send(0, "back")
    elif setup.address == 0:
        _follow_one_who_returns(mailbox, found, setup)
    else:
        work = mailbox.start_receive("more", 1)
        mailbox.send(0, "ready")
        found.expect("last words", get(mailbox, "last", 1).source, 1)
        with found.raises(PeerLostError, "peer 1 is lost (peer: 1, reason: it left)"):
            work.wait(soon)
        mailbox.send(0, "noticed")
    mailbox.await_peers(range(setup.size), soon)
    meet(setup, mailbox, "end of the program")
    mailbox.close()
    return found.problems


def _follow_one_who_returns(mailbox: AbstractMailbox, found: Findings, setup: Setup) -> None:
    before = mailbox.peers()
    mailbox.follow_peers()
    notes = [get(mailbox, JOINED) for _ in before]
    found.expect("who is there", {note.source: note.incarnation for note in notes}, before)
    get(mailbox, "ready")
    mailbox.send(1, "leave")
    tags = [get(mailbox, None, 1).tag for _ in range(2)]
    found.expect("the last words, then the end", tags, ["last", LEFT])
    get(mailbox, "noticed")
    note = get(mailbox, JOINED)
    found.expect("a later life", (note.source, note.incarnation > before[1]), (1, True))
    found.expect("which peers() tells", mailbox.peers()[1], note.incarnation)
    mailbox.send(1, "welcome")
    found.expect("messages of this life", get(mailbox, "back", 1).incarnation, note.incarnation)


def nobody_there(setup: Setup) -> list[str]:
    found = Findings()
    with everyone(setup) as mailbox:
        work = mailbox.start_send(55, "push", {}, [torch.ones(1)])
        for _ in range(2):
            with found.raises(PeerLostError, "peer: 55"):
                work.wait()
        found.expect("done", work.is_done(), True)
        found.expect("nothing refused", mailbox.refusals(), {})
    return found.problems


def misuse(setup: Setup) -> list[str]:
    found = Findings()
    to = setup.others[0]
    with everyone(setup) as mailbox:
        for tag in ("", "weft.push", "x" * 65):
            with found.raises(UsageError, "tag cannot be sent"):
                mailbox.send(to, tag)
        for header in ({"a": float("nan")}, {"a": {1, 2}}, {"a": object()}):
            with found.raises(UsageError, "header is not JSON"):
                mailbox.send(to, "push", header)
        with found.raises(UsageError, "header is too large"):
            mailbox.send(to, "push", {"a": "x" * 100_000})
        with found.raises(UsageError, "does not travel"):
            mailbox.send(to, "push", {}, [torch.ones(2, dtype=torch.complex64)])
        with found.raises(UsageError, "dense tensors that have values"):
            mailbox.send(to, "push", {}, [torch.ones(2, device="meta")])
        with found.raises(UsageError, "asks for nothing"):
            mailbox.start_receive(())
    mailbox.close()
    with found.raises(UsageError, "mailbox is closed"):
        mailbox.send(to, "push")
    with found.raises(UsageError, "mailbox is closed"):
        mailbox.receive("push")
    return found.problems


PROGRAMS: tuple[Program, ...] = (
    any_source,
    tags_and_order,
    payloads,
    tensors_belong_to_their_side,
    tensors_of_empty,
    receiving_into,
    deadlines,
    cancelling,
    fairness,
    own_messages,
    leaving_and_returning,
    nobody_there,
    misuse,
)
