"""Calling all who came before, until each has answered or is known to have gone.

refused, or somebody else's port by now   gone
no answer in time, or hung up on at once  called again: it sleeps, or has too many callers
"""

import threading
import time
from typing import NamedTuple, final

from weft.distributed.mailbox.reception import Reception
from weft.distributed.mailbox.sockets.calling import NoAnswerError, call, connect
from weft.distributed.mailbox.sockets.directory import AbstractDirectory, Member
from weft.distributed.mailbox.sockets.handshake import Hello, make_mark
from weft.distributed.mailbox.sockets.switchboard import HANDSHAKE_SECONDS, LONG_NAP, SHORT_NAP, Settings, Switchboard
from weft.errors import UsageError

__all__ = ["Joining"]


class _Life(NamedTuple):
    """A life of a peer, to be called."""

    number: int
    member: Member


@final
class Joining:
    """One mailbox's calls to those who came before. The switchboard runs already, so nobody waits for it meanwhile."""

    def __init__(
        self, directory: AbstractDirectory, reception: Reception, switchboard: Switchboard, settings: Settings
    ) -> None:
        self._directory = directory
        self._reception = reception
        self._switchboard = switchboard
        self._settings = settings
        self._stopped = threading.Event()

    def call_all(self) -> None:
        """Call the last life of every peer. Those who do not answer are called again, in the end in the background.

        Raises:
            UsageError: a peer of the roll knows another secret.
        """
        until = time.monotonic() + min(self._settings.timeout, HANDSHAKE_SECONDS)
        waiting = [life for life in self._find_last() if not self._reach(life)]
        while waiting and time.monotonic() < until:
            time.sleep(SHORT_NAP)
            waiting = [life for life in waiting if not self._reach(life)]
        if waiting:
            name = f"weft-mailbox-{self._reception.address}-calls"
            threading.Thread(target=self._go_on, args=(waiting,), name=name, daemon=True).start()

    def stop(self) -> None:
        """Call nobody any more; a call under way comes to nothing."""
        self._stopped.set()

    def _find_last(self) -> list[_Life]:
        last: dict[int, _Life] = {}
        for number in range(self._reception.incarnation):
            member = self._directory.read(number)
            if member is not None:
                last[member.address] = _Life(number, member)
        last.pop(self._reception.address, None)
        return [life for life in last.values() if not life.member.has_left]

    def _go_on(self, waiting: list[_Life]) -> None:
        nap = min(LONG_NAP, self._settings.timeout / 8)
        while waiting and not self._stopped.wait(nap):
            waiting = [life for life in waiting if not self._reach_quietly(life)]
            nap = min(2 * nap, self._settings.timeout)  # whoever has the port by now is not called all the time

    def _reach_quietly(self, life: _Life) -> bool:
        try:
            return self._stopped.is_set() or self._reach(life)
        except Exception:  # nobody is above to see it: the peer stays unknown, and that is counted
            self._reception.refuse("failed")
            return True

    def _reach(self, life: _Life) -> bool:
        """Call once; whether there is nothing more to be done about this life."""
        me, address, number = self._reception, life.member.address, life.number
        if me.find_latest(address) >= number:  # a later life has called
            return True
        hello = Hello(me.address, me.incarnation, address, number, self._settings.signs_bodies)
        try:
            connection = connect(life.member.endpoint, self._settings.timeout)
        except (TimeoutError, BlockingIOError):
            return False
        except OSError:
            return True
        is_taken = False
        try:
            session = call(connection, hello, self._settings.secret)
            if session is not None:
                self._switchboard.add(connection, session)
                is_taken = True
        except NoAnswerError:
            return False
        except UsageError:
            if life.member.mark != make_mark(self._settings.secret):
                raise
            self._reception.refuse("unauthenticated")  # it died, and somebody else has its port
        finally:
            if not is_taken:
                connection.close()
        return True
