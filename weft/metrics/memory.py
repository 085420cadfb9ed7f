"""Peak memory: of the process as the system sees it, and of tensors as torch sees them."""

import resource
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.torch_private import leave_compiler_alone

__all__ = ["MemoryPeak", "use_process_memory_peak", "use_tensor_memory_peak"]


@dataclass
class MemoryPeak:
    """The most memory seen so far, in bytes, and in words how it was seen."""

    num_bytes: int = 0
    source: str = ""

    def note(self, num_bytes: int) -> None:
        self.num_bytes = max(self.num_bytes, num_bytes)


_open_peaks: list[MemoryPeak] = []
"""Process peaks being taken. The system keeps one mark for all of them: who resets it tells the others its value."""


@contextmanager
def use_process_memory_peak(proc: Path = Path("/proc/self")) -> Iterator[MemoryPeak]:
    """The peak of resident memory while the block ran; valid after the block. Blocks may be nested.

    Where the system does not let the mark be reset, the peak is that of the whole life of the process, and `source`
    says so.
    """
    _note_process_peak(proc)
    peak = MemoryPeak(source="VmHWM of the block" if _reset_mark(proc) else "peak since the process began")
    _open_peaks.append(peak)
    try:
        yield peak
    finally:
        _note_process_peak(proc)
        _open_peaks[:] = [open_peak for open_peak in _open_peaks if open_peak is not peak]


@contextmanager
def use_tensor_memory_peak(device: torch.device | str = "cpu") -> Iterator[MemoryPeak]:
    """The most bytes of tensors alive at once on the device while the block ran; valid after the block.

    On CUDA and its like, what torch's allocator counts: every tensor there is. On the CPU, and on an accelerator whose
    allocator does not count, operators are watched one by one, which slows them several times: use it for one step.
    Counted are then the tensors that an operator of this thread makes or reads; one that was there before the block
    counts from its start. The scratch memory inside an operator, and tensors that are neither strided nor sparse COO,
    are not seen.

    >>> with use_tensor_memory_peak() as peak:
    ...     total = torch.ones(1000).sum()  # 1000 numbers and their sum, 4 bytes each
    >>> peak.num_bytes
    4004
    """
    device = torch.device(device)
    if device.type != "cpu" and _reset_device_mark(device):
        peak = MemoryPeak(source="torch.accelerator.max_memory_allocated")
        try:
            yield peak
        finally:
            peak.note(torch.accelerator.max_memory_allocated(device))
        return
    peak = MemoryPeak(source=f"storages seen by operators on {device.type}")
    with _StorageWatch(device, peak):
        yield peak


def _reset_device_mark(device: torch.device) -> bool:
    """Bring the mark of the device's allocator down to what is in use now; False where it keeps none."""
    try:
        torch.accelerator.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
    except (RuntimeError, NotImplementedError):
        return False
    return True


@leave_compiler_alone
class _StorageWatch(TorchDispatchMode):
    """Keeps account of storages, not of tensors: views share one, and a storage lives as long as autograd needs it."""

    def __init__(self, device: torch.device, peak: MemoryPeak) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._peak = peak
        self._live = 0
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        options = options or {}
        # torch.tensor() makes its result unseen and then passes it to lift_fresh: that one is new, not from before.
        if operator is not torch.ops.aten.lift_fresh.default:
            for storage in self._storages((arguments, options)):
                if id(storage) not in self._known:
                    # Alive since the block began, hence also at the moment of the peak, which is now seen to be higher.
                    self._peak.num_bytes += storage.nbytes()
                    self._account(storage)
        result = operator(*arguments, **options)
        for storage in self._storages(result):
            self._account(storage)
        self._peak.note(self._live)
        return result

    def _account(self, storage: torch.UntypedStorage) -> None:
        """Count a new storage, or the change in size of a known one."""
        key, num_bytes = id(storage), storage.nbytes()
        reference, counted = self._known.get(key, (None, 0))
        self._live += num_bytes - counted
        self._known[key] = (reference or weakref.ref(storage, partial(self._forget, key)), num_bytes)

    def _forget(self, key: int, _: object) -> None:
        self._live -= self._known.pop(key)[1]

    def _storages(self, tree: Any) -> Iterator[torch.UntypedStorage]:
        for tensor in _tensors(tree):
            if tensor.device.type == self._device.type:
                parts = (tensor._indices(), tensor._values()) if tensor.layout is torch.sparse_coo else (tensor,)
                yield from (part.untyped_storage() for part in parts if part.layout is torch.strided)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        yield from _tensors(tree.values())
    elif isinstance(tree, Iterable) and not isinstance(tree, str):
        for item in tree:
            yield from _tensors(item)


def _note_process_peak(proc: Path) -> None:
    seen = _process_peak(proc)
    for peak in _open_peaks:
        peak.note(seen)


def _process_peak(proc: Path) -> int:
    """The system's high-water mark of resident memory, in bytes."""
    try:
        lines = (proc / "status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _reset_mark(proc: Path) -> bool:
    """Bring the mark down to what is in use now, where the system allows it (Linux: writing 5 to clear_refs)."""
    try:
        (proc / "clear_refs").write_text("5")
    except OSError:
        return False
    return True
