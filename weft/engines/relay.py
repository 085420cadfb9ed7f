"""The output of ranks on its way through the launcher: shown as it comes or line by line behind the rank, and kept.

    rank ---> out-RANK, err-RANK ---> launcher -+-> its own output   `[rank 1] epoch 3`, whole lines only
              a FIFO, or a terminal             +-> rank-RANK.log    every byte, also what libraries print past Python

Where rank 0 prints to a terminal, and its lines are shown as they are, it has one in between too: its progress bars and
their width are those that it would have without.
"""

import errno
import fcntl
import os
import pty
import select
import struct
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, final

from weft.engines.rank_program import log_of, stream_of

__all__ = ["Shows", "use_relay"]

Shows = Literal["first", "all"]
"""Whose output is shown: that of rank 0 as it is, or every line of all ranks behind the rank."""

CHUNK = 65536
LONGEST_LINE = 1 << 20  # a line that never ends is shown in pieces
LAST_SECONDS = 0.2  # how long a terminal whose other side somebody holds may be silent before it is left


@contextmanager
def use_relay(folder: Path, num_ranks: int, *, shows: Shows, keeps_logs: bool) -> Iterator[frozenset[int]]:
    """Pass on what ranks print while the block runs, and the rest of it at its end; gives the ranks that are shown."""
    ranks = frozenset(range(num_ranks)) if shows == "all" else frozenset({0})
    if shows == "first" and not keeps_logs:  # straight to the output of this process
        yield ranks
        return
    relay = Relay(folder, ranks, has_prefix=shows == "all", keeps_logs=keeps_logs)
    try:
        yield ranks
    finally:
        relay.close()


def whole_lines(content: bytes, prefix: bytes) -> tuple[bytes, bytes]:
    """The whole lines of what was printed, each behind a prefix, and the rest. A line that was written over (a progress
    bar) is shown as it was last.

    >>> whole_lines(b"10%\\r20%\\nloss 3\\nacc", b"[rank 1] ")
    (b'[rank 1] 20%\\n[rank 1] loss 3\\n', b'acc')
    """
    *lines, rest = content.split(b"\n")
    if len(rest) > LONGEST_LINE:
        lines, rest = [*lines, rest], b""
    return b"".join(prefix + line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n" for line in lines), rest


@final
class Source:
    """One stream of a rank: what it prints to, and where that goes."""

    def __init__(self, path: Path, target: int, prefix: bytes, log: int | None) -> None:
        self.target, self.prefix, self.log = target, prefix, log
        self.pending = b""
        self.terminal: int | None = None  # the side of the rank
        if not prefix and os.isatty(target):
            self.descriptor, self.terminal = pty.openpty()
            tty.setraw(self.terminal)  # the outer terminal does the rest
            path.symlink_to(os.ttyname(self.terminal))
            self.fit_window()
        else:
            os.mkfifo(path, 0o600)
            self.descriptor = os.open(path, os.O_RDWR)  # a writer too, so that it has no end while ranks come and go
        os.set_blocking(self.descriptor, False)

    def fit_window(self) -> None:
        """The size of the terminal outside, which may change, is that inside."""
        with suppress(OSError):
            size = fcntl.ioctl(self.target, termios.TIOCGWINSZ, struct.pack("4H", 0, 0, 0, 0))
            fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, size)

    def read(self) -> bytes | None:
        """All that has come; None at the end, nothing where nothing has."""
        try:
            return os.read(self.descriptor, CHUNK) or None
        except BlockingIOError:
            return b""
        except OSError as error:
            if error.errno != errno.EIO:  # so Linux tells that nobody has the terminal open any more
                raise
            return None

    def pass_on(self, content: bytes) -> None:
        if self.log is not None:
            _write(self.log, content)
        if self.prefix:
            content, self.pending = whole_lines(self.pending + content, self.prefix)
        if self.terminal is not None:
            self.fit_window()
        _write(self.target, content)

    def finish(self) -> None:
        """Pass on what is left when the ranks have ended, also a last line without its end."""
        patience = 0.0  # a FIFO has at once what was written; in a terminal it may be on its way still
        if self.terminal is not None:
            os.close(self.terminal)
            self.terminal, patience = None, LAST_SECONDS
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        while poll.poll(1000 * patience) and (content := self.read()):
            self.pass_on(content)
        if self.pending:
            _write(self.target, whole_lines(self.pending + b"\n", self.prefix)[0])


@final
class Relay:
    """A thread of the launcher that reads what ranks print."""

    def __init__(self, folder: Path, ranks: frozenset[int], *, has_prefix: bool, keeps_logs: bool) -> None:
        self._sources: dict[int, Source] = {}
        self._logs: list[int] = []
        self._wake = os.pipe()
        for rank in sorted(ranks):
            log = self._open_log(folder, rank) if keeps_logs else None
            prefix = f"[rank {rank}] ".encode() if has_prefix else b""
            self._add(Source(stream_of(folder, rank, "out"), 1, prefix, log))
            if not _is_one_output():
                self._add(Source(stream_of(folder, rank, "err"), 2, prefix, log))
            else:  # what goes to one place keeps its order
                stream_of(folder, rank, "err").symlink_to(stream_of(folder, rank, "out"))
        self._thread = threading.Thread(target=self._run, name="weft-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self._wake[1])
        self._thread.join()
        for source in self._sources.values():
            with suppress(OSError):
                source.finish()
            os.close(source.descriptor)
        for descriptor in (*self._logs, self._wake[0]):
            os.close(descriptor)

    def _open_log(self, folder: Path, rank: int) -> int:
        log = os.open(log_of(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._logs.append(log)
        return log

    def _add(self, source: Source) -> None:
        self._sources[source.descriptor] = source

    def _run(self) -> None:
        poll = select.poll()
        for descriptor in (self._wake[0], *self._sources):
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._wake[0]:
                    return
                source = self._sources[descriptor]
                try:
                    source.pass_on(source.read() or b"")
                except OSError:  # nobody reads our output any more: the rank is told so, as by any pipe
                    poll.unregister(descriptor)
                    os.close(self._sources.pop(descriptor).descriptor)


def _is_one_output() -> bool:
    """Whether standard output and error are the same: a terminal, or `2>&1`."""
    return os.path.samestat(os.fstat(1), os.fstat(2))


def _write(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]
