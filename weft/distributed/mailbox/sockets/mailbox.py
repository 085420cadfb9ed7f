"""A mailbox over sockets: TCP between hosts or processes, or shared memory between the processes of one host."""

import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from weft.distributed.group.clock import AbstractClock
from weft.distributed.group.group import AbstractWork, DoneWork
from weft.distributed.mailbox.lost import LostWork
from weft.distributed.mailbox.mailbox import FOREVER, AbstractMailbox, AbstractReceive, Message, Sources, Tags
from weft.distributed.mailbox.payload import check_tag, decode_header, encode_header, prepare_tensors
from weft.distributed.mailbox.reception import Reception, explain_gone
from weft.distributed.mailbox.sockets.memory import SharedBodies
from weft.distributed.mailbox.sockets.switchboard import Switchboard
from weft.distributed.mailbox.sockets.windows import SharedWindows
from weft.distributed.mailbox.window import AbstractWindow
from weft.errors import DeadlineError, UsageError

__all__ = ["SocketMailbox"]

POLL_SECONDS = 0.001


@final
class SocketMailbox(AbstractMailbox):
    """One peer; made by `open_sockets`. `give_back` is called once, at the end."""

    def __init__(
        self,
        reception: Reception,
        switchboard: Switchboard,
        windows: SharedWindows | None,
        bodies: SharedBodies | None,
        *,
        give_back: Callable[[], None],
    ) -> None:
        self._reception = reception
        self._switchboard = switchboard
        self._windows = windows
        self._bodies = bodies
        self._closing = threading.Lock()
        self._shut = weakref.finalize(self, _shut, reception, switchboard, give_back)  # also when the interpreter ends

    @property
    def address(self) -> int:
        return self._reception.address

    @property
    def incarnation(self) -> int:
        return self._reception.incarnation

    @property
    def clock(self) -> AbstractClock:
        return self._reception.clock

    def start_send(
        self, to: int, tag: str, header: Mapping[str, Any] | None = None, tensors: Sequence[Tensor] = ()
    ) -> AbstractWork:
        self._reception.check_open()
        check_tag(tag)
        encoded, dense = encode_header(header), prepare_tensors(tensors)
        if to == self.address:
            copies = tuple(tensor.clone() for tensor in dense)
            self._reception.deliver(Message(to, tag, decode_header(encoded), copies, self.incarnation))
            return DoneWork()
        link = self._switchboard.find(to)
        if link is None:
            return LostWork(self._reception.find_loss(to) or explain_gone(to, "it has just left"))
        return link.send_message(tag, encoded, dense)

    def start_receive(
        self, tag: Tags = None, source: Sources = None, *, into: Sequence[Tensor] | None = None
    ) -> AbstractReceive:
        return self._reception.start_receive(tag, source, into)

    def wait_any(self, receives: Sequence[AbstractReceive], deadline: float = FOREVER) -> int:
        return self._reception.wait_any(receives, deadline)

    def peers(self) -> dict[int, int]:
        return self._reception.peers()

    def await_peers(self, addresses: Collection[int], deadline: float = FOREVER) -> None:
        self._reception.await_peers(addresses, deadline)

    def follow_peers(self) -> None:
        self._reception.follow_peers()

    def expose(self, name: str, tensor: Tensor) -> Tensor:
        self._reception.check_open()
        (dense,) = prepare_tensors([tensor])
        return self._need_windows().expose(self.incarnation, name, dense)

    def window(self, peer: int, name: str, deadline: float = FOREVER) -> AbstractWindow:
        windows = self._need_windows()
        while True:
            self._reception.check_open()
            incarnation = self.incarnation if peer == self.address else self.peers().get(peer)
            window = None if incarnation is None else windows.find(incarnation, name)
            if window is not None:
                return window
            if self._reception.has_gone(peer):
                raise self._reception.find_loss(peer) or explain_gone(peer, "it has just left")
            if self.clock.now() >= deadline:
                raise DeadlineError(f"window was not exposed in time (peer: {peer}, name: {name}); wait", (peer,))
            time.sleep(POLL_SECONDS)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype) if self._bodies is None else self._bodies.empty(shape, dtype)

    def refusals(self) -> dict[str, int]:
        return self._reception.refusals()

    def close(self) -> None:
        with self._closing:  # whoever closes it too returns when it is closed
            self._shut()

    def _need_windows(self) -> SharedWindows:
        if self._windows is None:
            raise UsageError("TCP has no windows; send messages, or open a mailbox of kind shared_memory")
        return self._windows


def _shut(reception: Reception, switchboard: Switchboard, give_back: Callable[[], None]) -> None:
    reception.close()
    switchboard.close()
    give_back()
