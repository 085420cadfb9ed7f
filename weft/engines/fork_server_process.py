"""The fork server: imports what ranks need, once, and forks them on request; see fork_server.py.

    python -m weft.engines.fork_server_process SOCKET LAUNCHER

It has one thread and touches no tensor, because threads (and their locks) do not survive a fork. A rank that is forked
from it computes the same bits as a process that was started for it.
"""

import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from weft.engines.meeting import remove_abandoned
from weft.engines.rank_process import be_rank, die_with_parent

__all__ = ["PRELOADED", "serve"]

# Weft's own and what it stands on; never a user's module, which may change between two runs.
PRELOADED = (
    "torch",
    "torch.distributed",
    "numpy",
    "numpy.random",
    "safetensors.torch",
    "weft.runs.rank",
    "weft.distributed.script.weaving.weave",
    "weft.proving",
    "weft.recipes",
)


@dataclass(frozen=True)
class Request:
    """A rank that is to be: its folder, its environment, and the streams that it prints to (descriptors)."""

    folder: Path
    cwd: str
    environment: dict[str, str]
    streams: tuple[int, int]


def main(control: socket.socket, launcher: int) -> int:
    """Serve until the launcher is gone. In a forked process, this is the whole life of a rank."""
    watch = os.pidfd_open(launcher)
    if os.getppid() != launcher:
        return 0
    for name in PRELOADED:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        return 1
    gc.collect()
    gc.freeze()  # pages of objects that the collector does not touch stay shared with the ranks
    _tell(control, "ready")
    server = os.getpid()
    request = serve(control, watch)
    if request is not None:
        die_with_parent(server)
        become_rank(request)
    return 0


def serve(control: socket.socket, watch: int) -> Request | None:
    """Fork a rank for each request, and tell how it ended.

    Args:
        control: the socket to the launcher.
        watch: the descriptor of the launcher's process.

    Returns:
        In the process of a rank its request, all that is the server's closed; in the server None, when the launcher
        has gone.
    """
    poll, ranks = select.poll(), dict[int, int]()
    for source in (control.fileno(), watch):
        poll.register(source, select.POLLIN)
    while True:
        for source, _ in poll.poll():
            if source in ranks:
                poll.unregister(source)
                _tell_end(control, source, ranks.pop(source))
                continue
            content, descriptors = b"", list[int]()
            if source != watch:
                content, descriptors, _, _ = socket.recv_fds(control, 16, 3, socket.MSG_CMSG_CLOEXEC)
            if not content:
                _end_ranks(ranks)
                remove_abandoned()  # a launcher that was killed has left the folder in which its ranks met
                return None
            rank = os.fork()
            if rank == 0:
                control.close()
                for descriptor in (watch, *ranks):
                    os.close(descriptor)
                return _read_request(*descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            pidfd = os.pidfd_open(rank)
            ranks[pidfd] = rank
            poll.register(pidfd, select.POLLIN)
            _tell(control, "started", pidfd, pid=rank)


def become_rank(request: Request) -> NoReturn:
    """Make this process what a new one would be, and run the program."""
    os.setsid()  # as of any process that an engine starts: the terminal's Ctrl-C is the launcher's
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.environment)
    if not sys.flags.safe_path:
        sys.path[0] = request.cwd
    sys.argv = [sys.argv[0], str(request.folder)]
    importlib.invalidate_caches()
    _use_streams(*request.streams)
    _use_threads(int(request.environment["OMP_NUM_THREADS"]))
    _use_entropy()
    try:
        code = be_rank(request.folder, int(request.environment["WEFT_RANK"]))
    except SystemExit as error:
        code = _code_of(error)
    _leave(code)


def _code_of(error: SystemExit) -> int:
    """The exit code that Python gives to `sys.exit(...)`."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _leave(code: int) -> NoReturn:
    """End as Python does, but do not take apart, object by object, what was imported: that takes 0.2 s."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _read_request(file: int, out: int, error: int) -> Request:
    with os.fdopen(file, "rb") as content:
        content.seek(0)
        data = json.load(content)
    return Request(Path(data["folder"]), data["cwd"], data["environment"], (out, error))


def _use_streams(out: int, error: int) -> None:
    for descriptor, number in ((out, 1), (error, 2)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    # Buffered as Python does it: a terminal gets whole lines at once.
    for name, number in (("stdout", 1), ("stderr", 2)):
        before: io.TextIOWrapper = getattr(sys, name)
        unbuffered = before.write_through
        stream = io.TextIOWrapper(
            open(number, "wb", buffering=0 if unbuffered else -1, closefd=False),  # noqa: SIM115
            encoding=before.encoding,
            errors=before.errors,
            line_buffering=not unbuffered and (number == 2 or os.isatty(number)),
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _use_threads(num_threads: int) -> None:
    """So many threads in torch and in numpy, as the libraries take from OMP_NUM_THREADS when they are loaded."""
    torch = sys.modules["torch"]
    torch.set_num_threads(num_threads)
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    for path in loaded:
        if "libtorch_cpu" in path:  # set_num_threads has switched this off
            _call(path, "MKL_Set_Dynamic", 1)
        elif "openblas" in path:
            for prefix, suffix in (("scipy_", "64_"), ("", "")):
                _call(path, f"{prefix}openblas_set_num_threads{suffix}", num_threads)


def _use_entropy() -> None:
    """Generators that nobody has seeded begin anew in each process; Python's own does so by itself after a fork."""
    sys.modules["torch"].default_generator.seed()
    sys.modules["numpy"].random.seed()


def _call(library: str, function: str, argument: int) -> None:
    """Call a C function of a library that may not have it (another build of torch or numpy)."""
    found = getattr(ctypes.CDLL(library), function, None)
    if found is not None:
        found(argument)


def _end_ranks(ranks: dict[int, int]) -> None:
    for rank in ranks.values():
        os.kill(rank, signal.SIGKILL)
    for rank in ranks.values():
        os.waitpid(rank, 0)


def _tell_end(control: socket.socket, pidfd: int, rank: int) -> None:
    _, status = os.waitpid(rank, 0)
    os.close(pidfd)
    _tell(control, "ended", pid=rank, code=os.waitstatus_to_exitcode(status))


def _tell(control: socket.socket, kind: str, *descriptors: int, **values: Any) -> None:
    with suppress(OSError):  # the launcher is gone; its descriptor says so next
        socket.send_fds(control, [json.dumps({"kind": kind, **values}).encode()], list(descriptors))


if __name__ == "__main__":
    sys.exit(main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])))
