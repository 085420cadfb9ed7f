"""Where peers find each other: a directory of numbered entries, one for each incarnation of a peer.

member-0  address 0, 127.0.0.1:4001      a peer that joins takes the next number, then connects to all before it,
member-1  address 1, 127.0.0.1:4002      so two peers never connect to each other at once;
member-2  address 1, 127.0.0.1:4003      the number is the incarnation: 2 is a later one of peer 1
"""

import json
import os
import secrets
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, final

from weft.atomic import write_text
from weft.distributed.group.shared_memory.rendezvous import Invitation
from weft.errors import UsageError

__all__ = ["AbstractDirectory", "FolderDirectory", "Member", "StoreDirectory"]

MAX_MEMBERS = 1_000_000
# How long an entry that somebody has taken the number for may take to appear, before its owner counts as gone.
ENTRY_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Member:
    """How an incarnation of a peer is reached: `endpoint` is host and port, or the name of a Unix socket.

    `shared_memory` invites to the memory that it shares with others on its host. `fingerprint` tells which secret it
    knows.
    """

    address: int
    endpoint: str
    shared_memory: str = ""
    fingerprint: str = ""
    has_left: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class AbstractDirectory(ABC):
    """The entries of one run."""

    @abstractmethod
    def join(self, member: Member) -> int:
        """Add an entry; returns its number. Entries below it are all there."""

    @abstractmethod
    def read(self, number: int) -> Member | None:
        """An entry, None where there is none."""

    @abstractmethod
    def _write(self, number: int, member: Member) -> None:
        """Replace an entry."""

    @final
    def find_invitation(self, number: int) -> Invitation | None:
        """The one to the shared memory of an entry."""
        member = self.read(number)
        return Invitation.parse(member.shared_memory) if member is not None and member.shared_memory else None

    @final
    def leave(self, number: int) -> None:
        """Mark an entry as left, so that nobody connects to it any more."""
        member = self.read(number)
        if member is not None:
            self._write(number, replace(member, has_left=True))


@final
class FolderDirectory(AbstractDirectory):
    """Files in a folder that all peers can see: no port that must be known, any order of start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "mailbox"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def join(self, member: Member) -> int:
        """A link to a whole file either takes the number or fails because somebody else has it."""
        scratch = self._folder / f".{secrets.token_hex(8)}.tmp"
        write_text(scratch, member.to_json())
        num_members = sum(name.startswith("member-") for name in os.listdir(self._folder))
        try:
            for number in range(num_members, MAX_MEMBERS):
                try:
                    os.link(scratch, self._path(number))
                    return number
                except FileExistsError:
                    continue
            raise UsageError(f"mailbox has been joined too often (entries: {MAX_MEMBERS}); start a new run")
        finally:
            scratch.unlink()

    def read(self, number: int) -> Member | None:
        try:
            return Member(**json.loads(self._path(number).read_text()))
        except FileNotFoundError:
            return None

    def _write(self, number: int, member: Member) -> None:
        write_text(self._path(number), member.to_json())

    def _path(self, number: int) -> Path:
        return self._folder / f"member-{number}"


@final
class StoreDirectory(AbstractDirectory):
    """A store of torch.distributed, for peers on hosts that share no folder."""

    def __init__(self, store: Any) -> None:
        self._store = store  # a torch.distributed.Store, whose type stubs are incomplete

    def join(self, member: Member) -> int:
        number = int(self._store.add("mailbox/joined", 1)) - 1
        self._write(number, member)
        return number

    def read(self, number: int) -> Member | None:
        key = f"mailbox/member-{number}"
        if number >= self._store.add("mailbox/joined", 0):
            return None
        try:
            self._store.wait([key], timedelta(seconds=ENTRY_SECONDS))
        except RuntimeError:  # its owner died before it could write
            return None
        return Member(**json.loads(self._store.get(key)))

    def _write(self, number: int, member: Member) -> None:
        self._store.set(f"mailbox/member-{number}", member.to_json())
