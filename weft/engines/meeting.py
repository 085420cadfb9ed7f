"""The folder in which the ranks of a run meet, with the run's secret in it: there while its launcher lives, no longer.

    owner      locked by the launcher; the kernel lets go of the lock when the launcher is gone, however it went

A launcher removes its folder. That of one that was killed is removed by its fork server, or else when somebody starts
ranks on this machine again.
"""

import fcntl
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["remove_abandoned", "use_meeting_folder"]

PREFIX = "weft-ranks-"
OWNER = "owner"
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def use_meeting_folder() -> Iterator[Path]:
    """A new folder that only this user can read, gone when the block ends."""
    remove_abandoned()
    folder = Path(tempfile.gettempdir()) / f"{PREFIX}{secrets.token_hex(8)}"
    owner = -1
    try:
        folder.mkdir(mode=0o700)
        # Locked before it has the name by which others know it: else they could take the folder for abandoned.
        owner = os.open(folder / f".{OWNER}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(owner, fcntl.LOCK_EX)
        (folder / f".{OWNER}").rename(folder / OWNER)
        yield folder
    finally:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)  # a second one must not leave a part of it behind
        shutil.rmtree(folder, ignore_errors=True)
        if owner >= 0:
            os.close(owner)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def remove_abandoned() -> None:
    """Remove the folders of launchers of this user that are gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # somebody else's, or gone by now
            owner = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(owner).st_uid == os.geteuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(owner)
