"""The launcher's side of the fork server: a process that has imported torch, from which ranks are forked.

    launcher --- control socket ---> fork server --- fork ---> rank, rank, ...
             "fork" + request, streams          (weft/engines/fork_server_process.py)
             <--- "started" + pidfd
             <--- "ended", exit code

The server imports torch while the launcher does other things; a rank that is forked from it begins in milliseconds.
There is one for each launcher, which ends with it, and its ranks with it. This module does not import torch.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, final

__all__ = [
    "ForkServer",
    "ForkedRank",
    "find_fork_server",
    "fork_rank",
    "is_first_rank",
    "start_fork_server",
    "stop_fork_server",
]

START_SECONDS = 300.0  # an import of torch from a cold disk, on a busy machine
POLL_SECONDS = 0.05

# Variables that a process, its libraries or Python read once, when they start: a server that was started with others
# would give ranks that differ from new processes. Those of Intel's OpenMP are not among them: torch does not use it.
READ_AT_START = (
    *("PYTHON", "LD_", "MALLOC_", "GLIBC_", "LC_", "LANG", "TZ"),
    *("TORCH", "PYTORCH", "ATEN_", "C10_", "OMP_", "GOMP_", "DNNL_", "ONEDNN_", "NPY_", "CUDA_", "HIP_", "NCCL_"),
    *("MKL_", "OPENBLAS_", "GOTO_"),
)
NOT_READ = {"OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR"}  # set for each rank; read when it is used

RANK_VARIABLES = {"WEFT_RANK", "RANK", "OMPI_COMM_WORLD_RANK"}

# With these a user says himself how many threads a library has; a process that has loaded it already cannot obey.
SETS_THREADS = {"MKL_NUM_THREADS", "MKL_DOMAIN_NUM_THREADS", "MKL_DYNAMIC", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS"}


@final
class ForkServer:
    """The server process and the ranks that were forked from it. Calls may come from any thread."""

    def __init__(self) -> None:
        self.surroundings = _surroundings(os.environ)
        self.owner = os.getpid()
        self._lock = threading.RLock()
        self._is_ready = False
        self._running: set[int] = set()
        self._codes: dict[int, int] = {}
        self._started: list[tuple[int, int]] = []  # process and descriptor of a rank that nobody has taken yet
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "weft.engines.fork_server_process", str(theirs.fileno()), str(os.getpid())],
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_idle(self) -> bool:
        with self._lock:
            return not self._running

    def fork(self, folder: Path, environment: Mapping[str, str]) -> "ForkedRank":
        """Fork a rank that prints to the streams of this process.

        Raises:
            OSError: the server has ended, or is not fit to fork.
        """
        request = json.dumps({"folder": str(folder), "cwd": os.getcwd(), "environment": dict(environment)})
        with self._lock, os.fdopen(os.memfd_create("weft-rank"), "w+b") as file:  # as large as it may be
            file.write(request.encode())
            file.flush()
            self._receive_until(lambda: self._is_ready)
            socket.send_fds(self._control, [b"fork"], [file.fileno(), 1, 2])
            self._receive_until(lambda: bool(self._started))
            return ForkedRank(self, *self._started.pop())

    def code_of(self, pid: int) -> int:
        """The exit code of a rank that has ended, as subprocess has them."""
        with self._lock:
            try:
                while pid not in self._codes:
                    self._receive(POLL_SECONDS)
            except (OSError, ValueError):  # the server was killed or closed, and its ranks with it
                self._note_end(pid, -signal.SIGKILL)
            return self._codes[pid]

    def close(self) -> None:
        """End the server, and its ranks with it."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _receive_until(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not is_done():
            if time.monotonic() > deadline:
                raise TimeoutError("fork server does not answer")
            self._receive(POLL_SECONDS)

    def _receive(self, seconds: float) -> None:
        """Take in one message, if one comes in time. A signal handler may call this in the middle of itself."""
        if not _is_readable(self._control, seconds):
            return
        try:
            flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            content, descriptors, _, _ = socket.recv_fds(self._control, 4096, 1, flags)
        except BlockingIOError:
            return
        if not content:
            raise ConnectionError("fork server has ended")
        message: dict[str, Any] = json.loads(content)
        match message["kind"]:
            case "ready":
                self._is_ready = True
            case "started":
                self._codes.pop(message["pid"], None)  # of another process, long ago, that had the same number
                self._running.add(message["pid"])
                self._started.append((message["pid"], descriptors[0]))
            case "ended":
                self._note_end(message["pid"], message["code"])

    def _note_end(self, pid: int, code: int) -> None:
        self._codes[pid] = code
        self._running.discard(pid)


@final
class ForkedRank:
    """A rank that the fork server has forked, with the methods of subprocess.Popen that an engine needs."""

    def __init__(self, server: ForkServer, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._server = server
        self._pidfd = pidfd
        self._code: int | None = None

    def poll(self) -> int | None:
        return self.wait() if self._code is not None or _is_readable(self._pidfd, 0.0) else None

    def wait(self) -> int:
        if self._code is None:
            _is_readable(self._pidfd, None)
            self._code = self._server.code_of(self.pid)
        return self._code

    def send_signal(self, sig: int, /) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        os.close(self._pidfd)


_server: ForkServer | None = None
_has_failed = False
_lock = threading.Lock()


def start_fork_server() -> None:
    """Start the fork server of this process, if it has none; returns at once, while the server imports torch.

    A process that is itself a rank starts no others, and gets none.
    """
    if not RANK_VARIABLES & os.environ.keys():
        with _lock, suppress(OSError):
            _get_server()


def is_first_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is nobody's rank, or rank 0, as its variables tell before torch is there to ask."""
    return all(environment.get(name, "0") == "0" for name in RANK_VARIABLES)


def stop_fork_server() -> None:
    """End the fork server of this process, if it has one."""
    with _lock:
        _close()


def find_fork_server() -> int | None:
    """The process id of this process's fork server, if it has one."""
    return _server.pid if _server is not None and _server.owner == os.getpid() else None


def fork_rank(folder: Path, environment: Mapping[str, str]) -> ForkedRank | None:
    """Fork a rank from the server, which is started if need be; None where that cannot be done.

    Args:
        folder: that of the rank program.
        environment: all variables that the rank has.
    """
    global _has_failed
    if _has_failed or SETS_THREADS & environment.keys():
        return None
    with _lock:
        try:
            server = _get_server()
            return None if server is None else server.fork(folder, environment)
        except (OSError, ValueError) as error:
            _has_failed = True
            print(f"notice: ranks start as new processes, each of which imports torch ({error})", file=sys.stderr)
            if _server is not None and _server.is_idle:  # else ranks would end with it that have no part in this
                _close()
            return None
        except BaseException:  # the conversation was broken off in the middle
            _close()
            raise


def _get_server() -> ForkServer | None:
    global _server
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return None
    if _server is not None and _server.owner != os.getpid():  # that of the process which this one was forked from
        _server = None
    if _server is not None and _server.surroundings != _surroundings(os.environ):
        if not _server.is_idle:
            return None
        _close()
    if _server is None:
        _server = ForkServer()
        atexit.register(stop_fork_server)
    return _server


def _close() -> None:
    global _server
    if _server is not None and _server.owner == os.getpid():
        _server.close()
        atexit.unregister(stop_fork_server)
    _server = None


def _surroundings(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(READ_AT_START) and k not in NOT_READ}


def _is_readable(source: Any, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))
