"""Where peers find each other: a roll of numbered entries, one for each life of a peer.

member-0  address 0, 127.0.0.1:4001      who joins takes the next number, then calls all who came before;
member-1  address 1, 127.0.0.1:4002      so two peers never call each other at once,
member-2  address 1, 127.0.0.1:4003      and the number is the incarnation: 2 is a later life of peer 1
"""

import json
import os
import secrets
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Protocol, final

from weft.atomic import write_text
from weft.errors import UsageError

__all__ = ["AbstractDirectory", "FolderDirectory", "Member", "StoreDirectory"]

MAX_MEMBERS = 1_000_000
# How long an entry that somebody has taken the number for may take to appear, before its owner counts as gone.
ENTRY_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Member:
    """How a life of a peer is reached: `endpoint` is host and port, or the name of a socket of this machine.

    `memory` invites to the memory that it shares with others on its host. `mark` tells which secret it knows.
    """

    address: int
    endpoint: str
    memory: str = ""
    mark: str = ""
    has_left: bool = False


class AbstractDirectory(ABC):
    """The roll of one run."""

    @abstractmethod
    def join(self, member: Member) -> int:
        """Enter the roll; returns the number of the entry. Entries below it are all there."""

    @abstractmethod
    def read(self, number: int) -> Member | None:
        """An entry, None where there is none."""

    @abstractmethod
    def leave(self, number: int) -> None:
        """Mark an entry as left, so that nobody calls it any more."""

    @abstractmethod
    def put_note(self, name: str, text: str) -> None:
        """Leave something for all to read under a name."""

    @abstractmethod
    def read_note(self, name: str) -> str | None: ...


@final
class FolderDirectory(AbstractDirectory):
    """Files in a folder that all peers can see: no port that must be known, any order of start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "mailbox"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def join(self, member: Member) -> int:
        """A link to a whole file either takes the number or fails because somebody else has it."""
        scratch = self._folder / f".{secrets.token_hex(8)}.tmp"
        write_text(scratch, json.dumps(asdict(member)))
        try:
            for number in range(self._count(), MAX_MEMBERS):
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

    def leave(self, number: int) -> None:
        member = self.read(number)
        if member is not None:
            write_text(self._path(number), json.dumps(asdict(replace(member, has_left=True))))

    def put_note(self, name: str, text: str) -> None:
        write_text(self._folder / f"note-{name}", text)

    def read_note(self, name: str) -> str | None:
        try:
            return (self._folder / f"note-{name}").read_text()
        except FileNotFoundError:
            return None

    def _path(self, number: int) -> Path:
        return self._folder / f"member-{number}"

    def _count(self) -> int:
        return sum(name.startswith("member-") for name in os.listdir(self._folder))


class _Store(Protocol):
    """What is needed of the stores of torch.distributed, whose type stubs are incomplete."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


@final
class StoreDirectory(AbstractDirectory):
    """A store of torch.distributed, for peers on hosts that share no folder."""

    def __init__(self, store: _Store) -> None:
        self._store = store

    def join(self, member: Member) -> int:
        number = self._store.add("mailbox/joined", 1) - 1
        self._store.set(f"mailbox/member-{number}", json.dumps(asdict(member)))
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

    def leave(self, number: int) -> None:
        member = self.read(number)
        if member is not None:
            self._store.set(f"mailbox/member-{number}", json.dumps(asdict(replace(member, has_left=True))))

    def put_note(self, name: str, text: str) -> None:
        self._store.set(f"mailbox/note-{name}", text)

    def read_note(self, name: str) -> str | None:
        key = f"mailbox/note-{name}"
        return self._store.get(key).decode() if self._store.check([key]) else None
