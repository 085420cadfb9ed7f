"""Calls as torch's observers see them: torch.profiler, and modes such as CommDebugMode.

    caller      start ------ wait ...................... | goes on
    resolver            waits for the call -- ends the record
    profiler    |--------- weft:all_reduce ------------|

A record that ends in another thread than it began in is one of an asynchronous call, as with torch's own backends.
"""

from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup, HashStore

__all__ = ["Announcer", "Record", "count_modes", "is_profiled"]

# The profiler and modes are asked about before each call: these are the cheapest ways to ask.
is_profiled = torch._C._autograd._profiler_enabled
count_modes = torch._C._len_torch_dispatch_stack

# Of each call the profiler's title, which is torch's, and which argument has the tensors that it shows.
_SHOWN = {
    "_allgather_base": ("all_gather", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "barrier": ("barrier", None),
    "broadcast": ("broadcast", 0),
    "gather": ("gather", 1),
    "recv": ("recv", 0),
    "recv_anysource": ("recvAnySource", 0),
    "reduce": ("reduce", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "scatter": ("scatter", 1),
    "send": ("send", 0),
}


@final
class Record:
    """A call in torch.profiler. It begins here, and ends where `end` is called."""

    def __init__(self, backend: str, name: str, arguments: Sequence[Any]) -> None:
        title, shown = _SHOWN[name]
        tensors = [] if shown is None else _tensors(arguments[shown])
        handle = torch._C._autograd._record_function_with_args_enter(f"{backend}:{title}", *tensors)
        self._call: torch.futures.Future[None] = torch.futures.Future()
        # The profiler's state is that of the caller's thread: torch carries it along to where the future is completed.
        self._ended = torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(handle, self._call)

    def end(self) -> None:
        self._call.set_result(None)

    def wait(self) -> None:
        self._ended.wait()


@final
class Announcer:
    """Lets modes see a call that torch's dispatcher does not: the same call of a group in which nothing is sent."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._silent: Any = None

    def announce(self, name: str, arguments: Sequence[Any]) -> None:
        if self._silent is None:
            self._silent = dist.ProcessGroup(HashStore(), self._rank, self._size)
            backend = FakeProcessGroup._create_internal(self._rank, self._size)
            self._silent._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
        given = [argument for argument in arguments if argument is not None]
        getattr(self._silent, name)(*_even(name, given, self._size))


def _even(name: str, arguments: list[Any], size: int) -> list[Any]:
    """Parts that differ are shown as equal ones: the silent group knows no others, and writes no results so."""
    if name == "allgather":
        return [[[tensor] * size for tensor in arguments[1]], *arguments[1:]]
    if name == "reduce_scatter":
        return [arguments[0], [[tensor] * size for tensor in arguments[0]], *arguments[2:]]
    return arguments


def _tensors(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
        return
    for inner in nested:
        yield from _tensors(inner)
