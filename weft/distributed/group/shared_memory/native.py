"""The compiled engine, bound through its C interface."""

import ctypes
import mmap
import weakref
from functools import cache
from pathlib import Path
from struct import Struct
from typing import Any, final

from weft.distributed.group.shared_memory.engine import AbstractTransferEngine, EngineConfig, Outcome, Reason, Timing
from weft.distributed.group.shared_memory.request import Request
from weft.operators.compile import compile_library

__all__ = ["NativeEngine", "arena_offset", "load_library", "segment_bytes"]

SOURCES = ("engine.cpp", "channels.h", "collectives.h", "parts.h", "reduce.h", "segment.h")

_INT, _LONG, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
# kind, type, op, root, tag, addresses of input and output, length, width, how many numbers: `Order` of engine.cpp.
_ORDER = Struct("=4i6q")
_QUICK: dict[str, tuple[Any, list[Any]]] = {
    "weft_arena_offset": (_LONG, [_INT, _LONG, _INT]),
    "weft_forget": (None, [_POINTER]),
    "weft_open": (_POINTER, [_POINTER, _INT, _LONG, _INT, _POINTER, _LONG, _INT, _INT]),
    "weft_segment_bytes": (_LONG, [_INT, _LONG]),
    "weft_source": (_INT, [_POINTER]),
    "weft_start": (_POINTER, [_POINTER, ctypes.c_char_p, _POINTER, _POINTER]),
    "weft_times": (None, [_POINTER, _POINTER]),
}
_BLOCKING: dict[str, tuple[Any, list[Any]]] = {
    "weft_close": (None, [_POINTER]),
    "weft_free": (None, [_POINTER]),
    "weft_is_done": (_INT, [_POINTER, _POINTER]),
    "weft_run": (_LONG, [_POINTER, ctypes.c_char_p, _POINTER, _POINTER]),
    "weft_wait": (_LONG, [_POINTER, _POINTER]),
}


@cache
def load_library() -> dict[str, Any]:
    """The functions of the engine, compiled at the first use. Those that may block let other Python threads run."""
    here = Path(__file__).parent
    path = str(compile_library([here / name for name in SOURCES]))
    functions: dict[str, Any] = {}
    for library, table in ((ctypes.PyDLL(path), _QUICK), (ctypes.CDLL(path), _BLOCKING)):
        for name, (result, arguments) in table.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            functions[name] = function
    return functions


def segment_bytes(size: int, arena_bytes: int) -> int:
    return int(load_library()["weft_segment_bytes"](size, arena_bytes))


def arena_offset(size: int, arena_bytes: int, rank: int) -> int:
    return int(load_library()["weft_arena_offset"](size, arena_bytes, rank))


@final
class NativeEngine(AbstractTransferEngine):
    """One rank's engine over `memory`."""

    def __init__(self, memory: mmap.mmap, config: EngineConfig) -> None:
        functions = load_library()
        self._start = functions["weft_start"]
        self._run = functions["weft_run"]
        self._wait = functions["weft_wait"]
        self._is_done = functions["weft_is_done"]
        self._times = functions["weft_times"]
        self._source = functions["weft_source"]
        self._close = functions["weft_close"]
        self._forget = functions["weft_forget"]
        self._memory: mmap.mmap | None = memory  # mapped for as long as the engine runs
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._engine: int = functions["weft_open"](
            base,
            config.size,
            config.arena_bytes,
            config.rank,
            (ctypes.c_int * config.size)(*config.pidfds),
            int(config.timeout * 1e9),
            config.may_spin,
            config.may_overlap,
        )
        # Not by `close`: another thread may be on its way into the engine with its address.
        weakref.finalize(self, functions["weft_free"], self._engine).atexit = False

    def start(self, request: Request) -> int:
        handle: int = self._start(self._engine, *_order(request))
        return handle

    def run(self, request: Request) -> Outcome | None:
        return _outcome_of(self._run(self._engine, *_order(request)))

    def wait(self, handle: int) -> Outcome | None:
        return _outcome_of(self._wait(self._engine, handle))

    def is_done(self, handle: int) -> bool:
        return bool(self._is_done(self._engine, handle))

    def timing(self, handle: int) -> Timing:
        times = (ctypes.c_int64 * 4)()
        self._times(handle, times)
        return Timing(*times)

    def source(self, handle: int) -> int:
        return int(self._source(handle))

    def forget(self, handle: int) -> None:
        self._forget(handle)

    def close(self) -> None:
        self._close(self._engine)
        self._memory = None


def _order(request: Request) -> tuple[bytes, Any, Any]:
    """One packed argument, as a long list of them costs ctypes more than the call itself; neighbours or lengths of
    parts; weights."""
    kind, source, target, length, width, type_, op, root, tag, numbers, weights, _ = request
    source_at = 0 if source is None else source.data_ptr()
    target_at = 0 if target is None else source_at if target is source else target.data_ptr()
    return (
        _ORDER.pack(kind, type_, op, root, tag, source_at, target_at, length, width, len(numbers)),
        (ctypes.c_int64 * len(numbers))(*numbers) if numbers else None,
        (ctypes.c_double * len(weights))(*weights) if weights else None,
    )


def _outcome_of(code: int) -> Outcome | None:
    """0 is for a call that ended well; else the reason, and in the upper half the rank that is the cause."""
    return None if code & 0xFFFFFFFF == 0 else Outcome(Reason(code & 0xFFFFFFFF), code >> 32)
