"""Ranks over torch.distributed: Gloo between processors, NCCL between GPUs.

The process groups are opened by hand from a store, so that the global state of torch.distributed, which belongs to the
user, is left alone. All ranks get the same bits from a reduction. All-reduce and reduce keep Gloo's own order (a ring:
it differs from the order of ranks from three ranks on); reduce-scatter, which Gloo lacks, follows the order of ranks.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal, final

import torch
import torch.distributed as distributed
from torch import Tensor

from weft.distributed.group.calls import Call, Recv, Send
from weft.distributed.group.checks import check_call
from weft.distributed.group.clock import RealClock
from weft.distributed.group.group import AbstractGroup, AbstractWork
from weft.distributed.group.liveness import LivenessMonitor, Store
from weft.distributed.group.torch_calls import StartedCall, TorchEndpoint, start_call
from weft.errors import PeerLostError, UsageError
from weft.specs import CPU

__all__ = ["TorchBackend", "TorchGroup"]

TorchBackend = Literal["gloo", "nccl"]

# Tags above those of users: one for each call between neighbours, and one on which nothing is ever sent.
FIRST_NEIGHBOUR_TAG = 1 << 29
NUM_NEIGHBOUR_TAGS = 1 << 20
NOTHING_TAG = 1 << 30
POLL_SECONDS = 0.001

_c10d: Any = distributed  # its type stubs lack the stores, and the options of process groups


@final
class TorchGroup(AbstractGroup):
    """All ranks that open the same store under the same size.

    `backend="nccl"` needs one GPU for each rank and tensors on it. It has not been tried: no machine with GPUs was at
    hand. NCCL has no tags either, and carries messages out in the order in which they were started: TwoSidedGroup gives
    it collectives alone.

    Args:
        store: where the ranks meet; it must outlive the rank that fails, or belong to rank 0.
        timeout: seconds after which a peer that does not take part counts as lost.
        interface: the network interface that Gloo listens on; None for the one of the host's name.
        device: where `empty()` makes tensors: this rank's own with NCCL.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout: float = 120.0,
        backend: TorchBackend = "gloo",
        interface: str | None = "lo",
        generation: int = 0,
        device: torch.device = CPU,
    ) -> None:
        super().__init__(rank, size, clock=RealClock(), generation=generation)
        self._store, self._timeout, self._backend, self._interface = store, timeout, backend, interface
        self._device = device
        self._num_splits = 0
        self._num_calls = 0
        self._transport: Any = None
        heartbeats = _c10d.PrefixStore("liveness", store)
        self._liveness = LivenessMonitor(
            heartbeats, rank, size, timeout=timeout, on_lost=lambda _: self._break_transport()
        )
        opening = _TorchWork(self._liveness)
        self._liveness.begin(opening)
        opening.run(self._open)
        opening.wait()

    def start(self, call: Call) -> AbstractWork:
        check_call(call, self._rank, self._size)
        self._check_open()
        work = _TorchWork(self._liveness)
        self._liveness.begin(work, peer=call.peer if isinstance(call, Send | Recv) else None)
        tag = FIRST_NEIGHBOUR_TAG + self._num_calls % NUM_NEIGHBOUR_TAGS
        self._num_calls += not isinstance(call, Send | Recv)
        work.run(lambda: start_call(TorchEndpoint(self._transport, self._rank, self._size), call, tag))
        return work

    def run(self, call: Call) -> None:
        self.start(call).wait()

    def split(self, colour: int, key: int) -> AbstractGroup:
        self._check_open()
        store = _c10d.PrefixStore(f"split/{self._num_splits}", self._store)
        self._num_splits += 1
        store.set(str(self._rank), f"{colour} {key}")
        answers = [self._ask(store, rank) for rank in range(self._size)]
        members = sorted((k, rank) for rank, (c, k) in enumerate(answers) if c == colour)
        return TorchGroup(
            _c10d.PrefixStore(str(colour), store),
            members.index((key, self._rank)),
            len(members),
            timeout=self._timeout,
            backend=self._backend,
            interface=self._interface,
            generation=self._generation,
            device=self._device,
        )

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def close(self) -> None:
        if self._transport is not None:
            self._liveness.close()
            if self._liveness.is_waiting:
                self._break_transport()  # or its threads would go on waiting
            self._transport = None

    def _open(self) -> StartedCall:
        store, timeout = _c10d.PrefixStore("transport", self._store), timedelta(seconds=self._timeout)
        if self._backend == "nccl":
            options = _c10d.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._transport = _c10d.ProcessGroupNCCL(store, self._rank, self._size, options)
        else:
            options = _c10d.ProcessGroupGloo._Options()
            options._timeout = timeout
            gloo = _c10d.ProcessGroupGloo
            device = gloo.create_device(interface=self._interface) if self._interface else gloo.create_default_device()
            options._devices = [device]
            self._transport = _c10d.ProcessGroupGloo(store, self._rank, self._size, options)
        return StartedCall([])

    def _check_open(self) -> None:
        self._liveness.check()
        if self._transport is None:
            raise UsageError(f"group is closed (rank: {self._rank}, size: {self._size}); open a new one")

    def _ask(self, store: Store, rank: int) -> tuple[int, int]:
        """The colour and key that a rank gave to `split`; PeerLostError where it never comes."""
        asking = _TorchWork(self._liveness)
        self._liveness.begin(asking, peer=rank)
        deadline = time.monotonic() + self._timeout
        while not store.check([str(rank)]):
            if time.monotonic() > deadline:
                self._liveness.explain(asking, was_timeout=True)
            self._liveness.check()
            time.sleep(POLL_SECONDS)
        colour, key = store.get(str(rank)).decode().split()
        return int(colour), int(key)

    def _break_transport(self) -> None:
        """Make every call under way fail at once: Gloo closes all connections when one receive takes too long."""
        if self._transport is None:
            return
        if self._backend == "nccl":
            self._transport.abort()
        elif self._size > 1:
            peer = (self._rank + 1) % self._size
            with suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8)
                self._transport.recv([nothing], peer, NOTHING_TAG).wait(timedelta(milliseconds=1))


@final
class _TorchWork(AbstractWork):
    """A call of a process group. The liveness monitor explains a failure: the transport cannot name the lost peer."""

    def __init__(self, liveness: LivenessMonitor) -> None:
        self._liveness = liveness
        self._started = StartedCall([])
        self._lock = threading.Lock()
        self._is_over = False
        self._error: Exception | None = None
        self._waiter: threading.Thread | None = None

    def run(self, start: Callable[[], StartedCall]) -> None:
        try:
            self._started = start()
        except RuntimeError as error:
            self._end(error)
        except BaseException:
            self._liveness.end(self)
            raise

    def wait(self) -> None:
        with self._lock:
            if not self._is_over:
                self._settle()
        if self._error is not None:
            raise self._error

    def is_done(self) -> bool:
        if self._is_over:
            return True
        if not self._started.is_message:
            return all(work.is_completed() for work in self._started.works)
        # Gloo tells of a message only that waiting for it has ended.
        if self._waiter is None:
            self._waiter = threading.Thread(target=self._wait_aside, name="weft-message", daemon=True)
            self._waiter.start()
        return False

    def _wait_aside(self) -> None:
        with self._lock:
            if not self._is_over:
                self._settle()

    def _settle(self) -> None:
        try:
            for work in self._started.works:
                work.wait()
            self._started.finish()
        except RuntimeError as error:
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: RuntimeError | None) -> None:
        self._error = error
        if error is not None:
            try:
                self._liveness.explain(self, was_timeout="timed out" in str(error).lower())
            except PeerLostError as lost:
                self._error = lost
        self._liveness.end(self)
        self._started = StartedCall([])
        self._is_over = True
