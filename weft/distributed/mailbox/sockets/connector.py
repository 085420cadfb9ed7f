"""Connecting to all peers that joined before, until each has answered or is known to have gone.

refused, or somebody else's port by now   gone
no answer in time, or hung up on at once  tried again: it sleeps, or has too many callers
"""

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple, final

from weft.distributed.mailbox.receiver import Receiver
from weft.distributed.mailbox.sockets.connections import Connections, ConnectionSettings
from weft.distributed.mailbox.sockets.directory import AbstractDirectory, Member
from weft.distributed.mailbox.sockets.endpoints import connect
from weft.distributed.mailbox.sockets.handshake import Hello, NoAnswerError, make_fingerprint, start_handshake
from weft.errors import UsageError

__all__ = ["Connector", "Entry", "find_earlier"]

PATIENCE_SECONDS = 5.0  # after this, or the timeout, those who do not answer are tried in the background
RETRY_SECONDS = 0.05


class Entry(NamedTuple):
    """An incarnation of a peer, to be connected to."""

    number: int
    member: Member


def find_earlier(directory: AbstractDirectory, address: int, incarnation: int) -> list[Entry]:
    """The last entry before this incarnation of every other peer, unless it has left."""
    last: dict[int, Entry] = {}
    for number in range(incarnation):
        member = directory.read(number)
        if member is not None:
            last[member.address] = Entry(number, member)
    last.pop(address, None)
    return [entry for entry in last.values() if not entry.member.has_left]


@final
class Connector:
    """One mailbox's calls to those who joined before. Runs in its loop, which takes calls meanwhile."""

    def __init__(self, receiver: Receiver, settings: ConnectionSettings, connections: Connections) -> None:
        self._receiver = receiver
        self._settings = settings
        self._connections = connections

    async def connect_all(self, entries: Sequence[Entry]) -> None:
        """Connect to all at once. Those who do not answer are tried again, in the end in the background.

        Raises:
            UsageError: a peer of the directory knows another secret.
        """
        if not entries:
            return
        patience = min(self._settings.timeout, PATIENCE_SECONDS)
        until = time.monotonic() + patience
        tasks = [asyncio.create_task(self._reach(entry, until)) for entry in entries]
        done, pending = await asyncio.wait(tasks, timeout=patience, return_when=asyncio.FIRST_EXCEPTION)
        for task in pending:
            task.add_done_callback(self._count_failure)
        for task in done:
            task.result()

    def _count_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:  # nobody waits for it: the peer stays unknown
            self._receiver.refuse("failed")

    async def _reach(self, entry: Entry, until: float) -> None:
        """Try until it has answered or is known to have gone; after `until` less and less often."""
        pause = RETRY_SECONDS
        while not await self._try(entry):
            await asyncio.sleep(pause)
            if time.monotonic() > until:
                pause = min(2 * pause, self._settings.timeout)

    async def _try(self, entry: Entry) -> bool:
        """Try once; whether there is nothing more to be done."""
        me, settings, member = self._receiver, self._settings, entry.member
        if self._connections.find_latest(member.address) >= entry.number:  # it, or a later incarnation, has called
            return True
        hello = Hello(me.address, me.incarnation, member.address, entry.number, settings.signs_bodies)
        try:
            async with asyncio.timeout(settings.timeout):
                connection = await connect(member.endpoint)
        except (TimeoutError, BlockingIOError):
            return False
        except OSError:
            return True
        is_taken = False
        try:
            session = await start_handshake(connection, hello, settings.secret, settings.timeout)
            if session is not None:
                self._connections.add(connection, session)
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
