"""Taking calls: whoever connects has a few seconds to prove that it is a peer."""

import asyncio
import errno
import socket
from typing import final

from weft.distributed.mailbox.receiver import Receiver
from weft.distributed.mailbox.sockets.connections import Connections, ConnectionSettings
from weft.distributed.mailbox.sockets.endpoints import send_at_once
from weft.distributed.mailbox.sockets.frames import RefusedError
from weft.distributed.mailbox.sockets.handshake import Hello, answer_handshake

__all__ = ["Acceptor"]

HANDSHAKE_SECONDS = 5.0
MAX_HANDSHAKES = 256  # at once
RETRY_SECONDS = 0.05
EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}  # a call waits, and cannot be taken now


@final
class Acceptor:
    """Owns the listening socket. Refusals are counted, and end that connection only."""

    def __init__(
        self, listener: socket.socket, receiver: Receiver, settings: ConnectionSettings, connections: Connections
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._receiver = receiver
        self._settings = settings
        self._connections = connections
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
        is_admitted = False
        try:
            send_at_once(connection)
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                session = await answer_handshake(connection, self._settings.secret, self._check)
            try:
                self._connections.admit(connection, session)
                is_admitted = True
            except Exception:  # no descriptors, no memory, a folder that is gone: only this one cannot be taken
                self._receiver.refuse("failed")
        except RefusedError as error:
            self._receiver.refuse(str(error))
        except (OSError, EOFError):
            self._receiver.refuse("unauthenticated")
        finally:
            if not is_admitted:
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
