"""The thread behind a mailbox: an event loop that connects, takes calls, reads, writes and notices silence."""

import asyncio
import socket
import threading
from contextlib import suppress
from typing import Any, final

from weft.distributed.mailbox.receiver import Receiver
from weft.distributed.mailbox.sockets.connection import Connection
from weft.distributed.mailbox.sockets.connections import Connections, ConnectionSettings
from weft.distributed.mailbox.sockets.directory import Member
from weft.distributed.mailbox.sockets.joining import Acceptor, connect_all
from weft.distributed.mailbox.sockets.shared_bodies import SharedBodies

__all__ = ["SocketTransport"]

CHECK_SECONDS = 1.0  # at most, between looks at the clock


@final
class SocketTransport:
    """Carries messages between one mailbox and its peers, from `start` until `close`."""

    def __init__(
        self, listener: socket.socket, receiver: Receiver, settings: ConnectionSettings, bodies: SharedBodies | None
    ) -> None:
        self._receiver = receiver
        self._loop = asyncio.new_event_loop()
        self._connections = Connections(self._loop, receiver, settings, bodies)
        self._acceptor = Acceptor(listener, self._connections)
        self._check_seconds = min(CHECK_SECONDS, settings.timeout / 8)
        self._is_closing = asyncio.Event()
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name=f"weft-mailbox-{receiver.address}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def connect_all(self, members: dict[int, Member]) -> None:
        """Returns when each of them has answered or has gone, or after a while. Raises as `joining.connect_all`."""
        asyncio.run_coroutine_threadsafe(connect_all(members, self._connections), self._loop).result()

    def find(self, peer: int) -> Connection | None:
        return self._connections.find(peer)

    def close(self) -> None:
        """Say goodbye to all, give their last messages a little time, and end the thread."""
        with suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._is_closing.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                self._loop.set_exception_handler(self._fail)
                runner.run(self._serve())
        except BaseException as error:  # nobody is above to see it: those who wait are told
            self._receiver.close(error)
        finally:
            self._acceptor.close()
            self._connections.close()

    async def _serve(self) -> None:
        checking = asyncio.create_task(self._check_peers())
        accepting, closing = asyncio.create_task(self._acceptor.run()), asyncio.create_task(self._is_closing.wait())
        tasks: set[asyncio.Future[Any]] = {checking, accepting, closing, self._failure}
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        for task in asyncio.all_tasks() - {checking, asyncio.current_task()}:  # nobody is taken in any more
            task.cancel()
        await self._connections.say_goodbye()

    async def _check_peers(self) -> None:
        while True:
            await asyncio.sleep(self._check_seconds)
            self._connections.check()

    def _fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback has raised."""
        if not self._failure.done():
            self._failure.set_exception(context.get("exception") or RuntimeError(context["message"]))
