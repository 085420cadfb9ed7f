"""How connections come about: calls to all peers that joined before, and calls taken from those that join later.

a peer that is called                         counts as
refuses, or its port is somebody else's now   gone
does not answer in time, or hangs up at once  asleep, or too busy: it is called again
"""

import asyncio
import errno
import socket
import time
from typing import final

from weft.distributed.mailbox.sockets.connections import Connections
from weft.distributed.mailbox.sockets.directory import AbstractDirectory, Member
from weft.distributed.mailbox.sockets.endpoints import connect, send_at_once
from weft.distributed.mailbox.sockets.frames import RefusedError
from weft.distributed.mailbox.sockets.handshake import (
    Hello,
    NoAnswerError,
    answer_handshake,
    make_fingerprint,
    start_handshake,
)
from weft.errors import UsageError

__all__ = ["Acceptor", "connect_all", "find_earlier"]

HANDSHAKE_SECONDS = 5.0
MAX_HANDSHAKES = 256  # at once
RETRY_SECONDS = 0.05
EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}  # a call waits, and cannot be taken now


@final
class Acceptor:
    """Owns the listening socket. Whoever calls has a few seconds to prove that it is a peer."""

    def __init__(self, listener: socket.socket, connections: Connections) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._connections = connections
        self._receiver = connections.receiver
        self._settings = connections.settings
        self._handshakes: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Take calls until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno in EXHAUSTED:
                    await asyncio.sleep(RETRY_SECONDS)
                continue  # else it has hung up already
            if len(self._handshakes) >= MAX_HANDSHAKES:
                self._receiver.refuse("crowded")
                connection.close()
                continue
            task = loop.create_task(self._admit(connection))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    def close(self) -> None:
        self._listener.close()

    async def _admit(self, connection: socket.socket) -> None:
        refusal: str | None = "unauthenticated"
        try:
            send_at_once(connection)
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                session = await answer_handshake(connection, self._settings.secret, self._check)
            refusal = "failed"  # no descriptors, no memory, a folder that is gone: only this one cannot be taken
            self._connections.admit(connection, session)
            refusal = None
        except RefusedError as error:
            refusal = str(error)
        except asyncio.CancelledError:
            connection.close()
            raise
        except Exception:
            pass
        if refusal is not None:
            self._receiver.refuse(refusal)
            connection.close()

    def _check(self, hello: Hello) -> None:
        """Raise RefusedError for one that knows the secret and still may not come in."""
        me, settings = self._receiver, self._settings
        if hello.address == me.address or (settings.known is not None and hello.address not in settings.known):
            raise RefusedError("unknown peer")
        if (hello.to, hello.to_incarnation) != (me.address, me.incarnation):
            raise RefusedError("misdirected")
        if settings.signs_bodies and not hello.signs_bodies:
            raise RefusedError("unsigned")
        if hello.incarnation <= self._connections.find_latest(hello.address):
            raise RefusedError("late")


def find_earlier(directory: AbstractDirectory, address: int, incarnation: int) -> dict[int, Member]:
    """The last entry before this incarnation of every other peer, unless it has left; by number."""
    last: dict[int, tuple[int, Member]] = {}
    for number in range(incarnation):
        member = directory.read(number)
        if member is not None:
            last[member.address] = (number, member)
    last.pop(address, None)
    return {number: member for number, member in last.values() if not member.has_left}


async def connect_all(members: dict[int, Member], connections: Connections) -> None:
    """Call all at once. Those who do not answer are called again, after a while in the background.

    Raises:
        UsageError: a peer of the directory knows another secret.
    """
    patience = min(connections.settings.timeout, HANDSHAKE_SECONDS)
    until = time.monotonic() + patience
    tasks = [asyncio.create_task(_reach(*item, connections, until)) for item in members.items()]
    if not tasks:
        return

    def count_failure(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:  # nobody waits for it: the peer stays unknown
            connections.receiver.refuse("failed")

    done, pending = await asyncio.wait(tasks, timeout=patience, return_when=asyncio.FIRST_EXCEPTION)
    for task in pending:
        task.add_done_callback(count_failure)
    for task in done:
        task.result()


async def _reach(number: int, member: Member, connections: Connections, until: float) -> None:
    """Call until it has answered or is known to have gone; after `until` less and less often."""
    pause = RETRY_SECONDS
    while not await _call(number, member, connections):
        await asyncio.sleep(pause)
        if time.monotonic() > until:
            pause = min(2 * pause, connections.settings.timeout)


async def _call(number: int, member: Member, connections: Connections) -> bool:
    """Call once; whether there is nothing more to be done."""
    me, settings = connections.receiver, connections.settings
    if connections.find_latest(member.address) >= number:  # a later incarnation has called
        return True
    try:
        async with asyncio.timeout(settings.timeout):
            connection = await connect(member.endpoint)
    except (TimeoutError, BlockingIOError):
        return False
    except OSError:
        return True
    hello = Hello(me.address, me.incarnation, member.address, number, settings.signs_bodies)
    is_taken = False
    try:
        session = await start_handshake(connection, hello, settings.secret, settings.timeout)
        if session is not None:
            connections.add(connection, session)
            is_taken = True
    except NoAnswerError:
        return False
    except UsageError:
        if member.fingerprint != make_fingerprint(settings.secret):
            raise
        me.refuse("unauthenticated")  # it died, and somebody else has its port
    finally:
        if not is_taken:
            connection.close()
    return True
