"""Mailboxes that are wrong on purpose, each in one way, and the program of the contract that must notice."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.distributed.mailbox import contract
from weft.distributed.group import AbstractWork, DoneWork
from weft.distributed.mailbox import FOREVER, AbstractMailbox, AbstractReceive, Sources, Tags
from weft.errors import DeadlineError


class BrokenMailbox(AbstractMailbox):
    """Wraps a mailbox; a subclass breaks what it overrides (which only tests may do)."""

    def __init__(self, inner: AbstractMailbox) -> None:
        self.inner = inner
        self.address, self.incarnation, self.clock = inner.address, inner.incarnation, inner.clock

    def start_send(
        self, to: int, tag: str, header: Mapping[str, Any] | None = None, tensors: Sequence[Tensor] = ()
    ) -> AbstractWork:
        return self.inner.start_send(to, tag, header, tensors)

    def start_receive(
        self, tag: Tags = None, source: Sources = None, *, into: Sequence[Tensor] | None = None
    ) -> AbstractReceive:
        return self.inner.start_receive(tag, source, into=into)

    def peers(self) -> dict[int, int]:
        return self.inner.peers()

    def await_peers(self, addresses: Collection[int], deadline: float = FOREVER) -> None:
        self.inner.await_peers(addresses, deadline)

    def follow_peers(self) -> None:
        self.inner.follow_peers()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return self.inner.empty(shape, dtype)

    def refusals(self) -> dict[str, int]:
        return self.inner.refusals()

    def close(self) -> None:
        self.inner.close()


class SwapsMessages(BrokenMailbox):
    """Every second message overtakes the one before."""

    held: tuple[Any, ...] | None = None

    def start_send(
        self, to: int, tag: str, header: Mapping[str, Any] | None = None, tensors: Sequence[Tensor] = ()
    ) -> AbstractWork:
        copies = [tensor.clone() for tensor in tensors]
        if tag == "push" and self.held is None:
            self.held = (to, tag, header, copies)
            return DoneWork()
        work = self.inner.start_send(to, tag, header, copies)
        if self.held is not None:
            self.inner.send(*self.held)
            self.held = None
        return work


class MixesTags(BrokenMailbox):
    """Hands out whatever comes."""

    def start_receive(
        self, tag: Tags = None, source: Sources = None, *, into: Sequence[Tensor] | None = None
    ) -> AbstractReceive:
        return self.inner.start_receive(None, source, into=into)


class MixesSources(BrokenMailbox):
    """Takes a message for that of another peer."""

    def start_receive(
        self, tag: Tags = None, source: Sources = None, *, into: Sequence[Tensor] | None = None
    ) -> AbstractReceive:
        return self.inner.start_receive(tag, None, into=into)


class SendsLater(BrokenMailbox):
    """Says that a send is done while it still needs the tensors."""

    held: tuple[Any, ...] | None = None

    def start_send(
        self, to: int, tag: str, header: Mapping[str, Any] | None = None, tensors: Sequence[Tensor] = ()
    ) -> AbstractWork:
        if self.held is not None:
            self.inner.send(*self.held)
            self.held = None
        if tag != "value":
            return self.inner.start_send(to, tag, header, tensors)
        self.held = (to, tag, header, tensors)
        return DoneWork()


class ChangesTypes(BrokenMailbox):
    """Sends everything in single precision."""

    def start_send(
        self, to: int, tag: str, header: Mapping[str, Any] | None = None, tensors: Sequence[Tensor] = ()
    ) -> AbstractWork:
        return self.inner.start_send(to, tag, header, [tensor.float() for tensor in tensors])


class FillsNothing(BrokenMailbox):
    """Leaves the tensors that were made ready as they are."""

    def start_receive(
        self, tag: Tags = None, source: Sources = None, *, into: Sequence[Tensor] | None = None
    ) -> AbstractReceive:
        return self.inner.start_receive(tag, source)


class NamesNobody(BrokenMailbox):
    """Its errors do not say who was waited for."""

    def start_receive(
        self, tag: Tags = None, source: Sources = None, *, into: Sequence[Tensor] | None = None
    ) -> AbstractReceive:
        return _Anonymous(self.inner.start_receive(tag, source, into=into))


class _Anonymous(AbstractReceive):
    def __init__(self, inner: AbstractReceive) -> None:
        self.inner = inner

    def wait(self, deadline: float = FOREVER) -> Any:
        try:
            return self.inner.wait(deadline)
        except DeadlineError:
            raise DeadlineError("nothing came", ()) from None

    def is_done(self) -> bool:
        return self.inner.is_done()

    def cancel(self) -> None:
        self.inner.cancel()


class KeepsTheCancelled(BrokenMailbox):
    """What came for a receive that is cancelled is lost."""

    def start_receive(
        self, tag: Tags = None, source: Sources = None, *, into: Sequence[Tensor] | None = None
    ) -> AbstractReceive:
        return _NeverCancelled(self.inner.start_receive(tag, source, into=into))


class _NeverCancelled(AbstractReceive):
    def __init__(self, inner: AbstractReceive) -> None:
        self.inner = inner

    def wait(self, deadline: float = FOREVER) -> Any:
        return self.inner.wait(deadline)

    def is_done(self) -> bool:
        return self.inner.is_done()

    def cancel(self) -> None:
        pass


class PrefersTheFirst(BrokenMailbox):
    """Serves peers in the order of their addresses, and starves the last."""

    def start_receive(
        self, tag: Tags = None, source: Sources = None, *, into: Sequence[Tensor] | None = None
    ) -> AbstractReceive:
        if source is None and into is None:
            for peer in sorted(self.peers()):
                receive = self.inner.start_receive(tag, peer)
                if receive.is_done():
                    return receive
                receive.cancel()
        return self.inner.start_receive(tag, source, into=into)


class FollowsNobody(BrokenMailbox):
    """Does not tell who comes and goes."""

    def follow_peers(self) -> None:
        pass


class ForgetsLives(BrokenMailbox):
    """Takes one who comes back for the same as before."""

    def peers(self) -> dict[int, int]:
        return dict.fromkeys(self.inner.peers(), 0)


class LosesTheLast(BrokenMailbox):
    """Drops what it was given just before the end."""

    def start_send(
        self, to: int, tag: str, header: Mapping[str, Any] | None = None, tensors: Sequence[Tensor] = ()
    ) -> AbstractWork:
        return DoneWork() if tag == "late" else self.inner.start_send(to, tag, header, tensors)


class TakesAnything(BrokenMailbox):
    """Lets a header pass that is not JSON."""

    def start_send(
        self, to: int, tag: str, header: Mapping[str, Any] | None = None, tensors: Sequence[Tensor] = ()
    ) -> AbstractWork:
        return self.inner.start_send(to, tag, {key: str(value) for key, value in (header or {}).items()}, tensors)


FAULTS: tuple[tuple[type[BrokenMailbox], contract.Program], ...] = (
    (SwapsMessages, contract.any_source),
    (MixesTags, contract.tags_and_order),
    (MixesSources, contract.tags_and_order),
    (SendsLater, contract.tensors_belong_to_their_side),
    (ChangesTypes, contract.payloads),
    (FillsNothing, contract.receiving_into),
    (NamesNobody, contract.deadlines),
    (LosesTheLast, contract.deadlines),
    (KeepsTheCancelled, contract.cancelling),
    (PrefersTheFirst, contract.fairness),
    (FollowsNobody, contract.leaving_and_returning),
    (ForgetsLives, contract.leaving_and_returning),
    (TakesAnything, contract.misuse),
)
