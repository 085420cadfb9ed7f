"""Ranks over MPI, through mpi4py: the processes that mpirun started, on one host or on many.

MPI adds up in an order of its own, the same for all ranks; it knows no 16-bit floats, so these travel as 32-bit ones
and are rounded once. Under plain mpirun a rank that dies ends all others, and mpirun names it; one that falls silent,
and one that dies under `mpirun --with-ft ulfm`, is named by heartbeats beside MPI.
"""

import atexit
import importlib
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as distributed
from torch import Tensor

from weft.distributed.group.calls import Call, Recv, Send
from weft.distributed.group.checks import check_call
from weft.distributed.group.clock import RealClock
from weft.distributed.group.group import AbstractGroup, AbstractWork
from weft.distributed.group.liveness import LivenessMonitor, Store
from weft.distributed.group.mpi_calls import MpiEndpoint, StartedCall, start_call
from weft.errors import PeerLostError, UsageError

__all__ = ["MpiGroup", "import_mpi", "open_store"]

# MPI moves data only while it is asked, so a rank that waits asks at once again, then less and less eagerly.
EAGER_TESTS = 2000
YIELDING_SECONDS = 0.2
IDLE_SECONDS = 50e-6
ADDRESS_BYTES = 256
FAREWELL_SECONDS = 10.0
FAULT_TOLERANCE = "OMPI_MCA_mpi_ft_enable"  # set by `mpirun --with-ft ulfm` for its ranks

_c10d: Any = distributed  # its type stubs lack the stores


def import_mpi() -> Any:
    """mpi4py's MPI; the first import starts MPI in this process."""
    try:
        return importlib.import_module("mpi4py.MPI")
    except ImportError as error:
        raise UsageError(f"MPI cannot be loaded ({error}); pip install 'weft[mpi]'") from None


def open_store(communicator: Any, timeout: float, *, is_one_host: bool) -> Store:
    """A store that the communicator's rank 0 keeps, bound to the loopback interface where all ranks are on one host."""
    mpi = import_mpi()
    address = bytearray(ADDRESS_BYTES)
    options = {"timeout": timedelta(seconds=timeout), "wait_for_workers": False}
    if communicator.rank == 0:
        host = "127.0.0.1" if is_one_host else socket.gethostbyname(socket.gethostname())
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        text = f"{host} {port}".encode()
        address[: len(text)] = text
        store = _c10d.TCPStore(host, port, is_master=True, master_listen_fd=listener.detach(), **options)
    communicator.Bcast([address, mpi.BYTE], root=0)
    if communicator.rank > 0:
        host, port = address.rstrip(b"\0").decode().split()
        store = _c10d.TCPStore(host, int(port), is_master=False, **options)
    return store  # type: ignore[no-any-return]


@final
class MpiGroup(AbstractGroup):
    """The ranks of a communicator, by default all that mpirun started.

    Args:
        communicator: of mpi4py; it is duplicated, so that messages never mix with the owner's.
        timeout: seconds after which a peer that does not take part counts as lost.
        store: where the ranks leave their heartbeats; by default one that rank 0 keeps.
    """

    def __init__(
        self, communicator: Any = None, *, timeout: float = 300.0, generation: int = 0, store: Store | None = None
    ) -> None:
        self._mpi = import_mpi()
        whole = communicator or self._mpi.COMM_WORLD
        super().__init__(whole.rank, whole.size, clock=RealClock(), generation=generation)
        self._endpoint = MpiEndpoint(self._mpi, whole.rank, whole.size, whole.Dup(), whole.Dup(), whole.Dup())
        self._timeout = timeout
        self._store = store or open_store(whole, timeout, is_one_host=_is_one_host(self._mpi, whole))
        self._num_splits = 0
        self._is_open = True
        self._heartbeats = _c10d.PrefixStore(f"liveness/{generation}", self._store)
        self._liveness = LivenessMonitor(
            self._heartbeats, self.rank, self.size, timeout=timeout, on_lost=self._leave_at_exit
        )

    def start(self, call: Call) -> AbstractWork:
        check_call(call, self.rank, self.size)
        self._check_open()
        work = _MpiWork(self._mpi, self._liveness, self._timeout)
        self._liveness.begin(work, peer=call.peer if isinstance(call, Send | Recv) else None)
        work.run(lambda: start_call(self._endpoint, call))
        return work

    def run(self, call: Call) -> None:
        self.start(call).wait()

    def split(self, colour: int, key: int) -> AbstractGroup:
        wishes = torch.empty(self.size, 2, dtype=torch.int64)
        self.all_gather(wishes, torch.tensor([colour, key]))  # finds a lost peer, which MPI's own split would wait for
        colours = sorted(set(wishes[:, 0].tolist()))
        part = self._endpoint.collectives.Split(colours.index(colour), key)
        store = _c10d.PrefixStore(f"split/{self._num_splits}/{colour}", self._store)
        self._num_splits += 1
        group = MpiGroup(part, timeout=self._timeout, generation=self._generation, store=store)
        part.Free()
        return group

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._liveness.close()
            if not self._liveness.has_lost and not self._liveness.is_waiting:
                self._endpoint.free()

    def _check_open(self) -> None:
        self._liveness.check()
        if not self._is_open:
            raise UsageError(f"group is closed (rank: {self.rank}, size: {self.size}); open a new one")

    def _leave_at_exit(self, lost: int) -> None:
        """MPI's own end would wait for the lost peer: leave without it, after all others have told their error too."""
        others = [rank for rank in range(self.size) if rank not in (lost, self.rank)]
        end = _leave if is_fault_tolerant() else self._mpi.COMM_WORLD.Abort
        atexit.register(end, PeerLostError.exit_code)
        atexit.register(_await_others, self._heartbeats, self.rank, others)  # runs first


def _await_others(store: Store, rank: int, others: Sequence[int]) -> None:
    """Wait until the others come to their end as well, or are late: mpirun ends all when the first is gone."""
    deadline = time.monotonic() + FAREWELL_SECONDS
    with suppress(RuntimeError):  # the store goes with the rank that keeps it, when it has seen all
        store.set(f"leaving/{rank}", "")
        while not store.check([f"leaving/{other}" for other in others]) and time.monotonic() < deadline:
            time.sleep(IDLE_SECONDS)


def is_fault_tolerant() -> bool:
    """Whether mpirun goes on after the loss of a rank."""
    return os.environ.get(FAULT_TOLERANCE) == "1"


def _leave(exit_code: int) -> None:
    """End as the lost rank did, which this mpirun tolerates. Its MPI_Abort after a loss was seen to end the ranks and
    never mpirun itself (Open MPI 5.0.11, one run in five)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _is_one_host(mpi: Any, communicator: Any) -> bool:
    here = communicator.Split_type(mpi.COMM_TYPE_SHARED)
    size = here.size
    here.Free()
    return bool(size == communicator.size)


@final
class _MpiWork(AbstractWork):
    """Requests under way. Waiting is asking again and again, so that a lost peer ends it."""

    def __init__(self, mpi: Any, liveness: LivenessMonitor, timeout: float) -> None:
        self._mpi, self._liveness, self._timeout = mpi, liveness, timeout
        self._started = StartedCall([])
        self._is_over = False
        self._error: Exception | None = None

    def run(self, start: Callable[[], StartedCall]) -> None:
        try:
            self._started = start()
        except self._mpi.Exception as error:
            self._fail(error, was_timeout=False)
        except BaseException:
            self._liveness.end(self)
            raise

    def wait(self) -> None:
        num_tests, began = 0, time.monotonic()
        while not self._test():
            num_tests += 1
            if num_tests % EAGER_TESTS == 0 or num_tests > EAGER_TESTS:
                self._pause(time.monotonic() - began)
        if self._error is not None:
            raise self._error

    def is_done(self) -> bool:
        return self._test()

    def _pause(self, waited: float) -> None:
        try:
            self._liveness.check()
            self._liveness.check_open()
        except (PeerLostError, UsageError) as error:
            self._end(error)
            return
        if waited > self._timeout:
            self._fail(TimeoutError(f"MPI took more than {self._timeout:g} s"), was_timeout=True)
        time.sleep(0 if waited < YIELDING_SECONDS else IDLE_SECONDS)

    def _test(self) -> bool:
        """Whether the call is over; finishes it when MPI is done."""
        if not self._is_over:
            try:
                if self._mpi.Request.Testall(self._started.requests):
                    self._started.finish()
                    self._end(None)
            except self._mpi.Exception as error:
                self._fail(error, was_timeout=False)
        return self._is_over

    def _fail(self, error: Exception, *, was_timeout: bool) -> None:
        try:
            self._liveness.explain(self, was_timeout=was_timeout)
        except PeerLostError as lost:
            error = lost
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        self._error = error
        self._liveness.end(self)
        if error is None:
            self._started = StartedCall([])  # else MPI may still write to the buffers: keep them
        self._is_over = True
