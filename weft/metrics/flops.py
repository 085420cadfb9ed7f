"""Floating-point operations: how many a call takes, how many a second this machine can do, and the share between.

A multiplication and an addition count as two. As is the custom, only matrix products, convolutions and attention are
counted: element-wise work is small beside them.
"""

import math
import re
import time
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from weft.torch_private import leave_compiler_alone

__all__ = ["UncountedFlopsWarning", "count_flops", "measured_peak", "share_of_peak"]

PEAK_SECONDS = 0.3
LARGEST_PRODUCT, FILLING_SECONDS = 8192, 5e-3
Shape = torch.Size
aten = torch.ops.aten


class UncountedFlopsWarning(UserWarning):
    """Work was done that the count leaves out, so that the count is only a lower bound."""


def count_flops(function: Callable[[], object]) -> int:
    """Floating-point operations of one call, counted while it runs once.

    Operators that do real work but have no formula are named in an UncountedFlopsWarning; a user gives them one with
    `torch.utils.flop_counter.register_flop_formula`.

    >>> count_flops(lambda: torch.ones(2, 3) @ torch.ones(3, 5))
    60
    """
    names = _OperatorNames()
    counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
    # The counter is entered last and so asked first: it breaks operators up, and what is left reaches the names.
    with names, counter:
        function()
    uncounted = sorted(str(operator) for operator in names.seen if _is_uncounted(operator))
    if uncounted:
        text = f"operators without a FLOP formula ran, the count is too low ({', '.join(uncounted)})"
        warnings.warn(f"{text}; give them one with register_flop_formula", UncountedFlopsWarning, stacklevel=2)
    return int(counter.get_total_flops())


def measured_peak(device: torch.device | str = "cpu") -> float:
    """FLOP/s of a large float32 matrix product here and now, with the present number of threads.

    Takes under a second, once per process, device and number of threads.
    """
    return _measure_peak(str(device), torch.get_num_threads())


def share_of_peak(flop_rate: float, device: torch.device | str = "cpu") -> float:
    """A rate in FLOP/s as a share of the measured peak. It can pass 1 in types that are faster than float32."""
    return flop_rate / measured_peak(device)


@cache
def _measure_peak(device: str, num_threads: int) -> float:
    size = 1024
    matrix = torch.ones(size, size, device=device)  # not random: the global generator stays as it is
    _seconds(matrix)  # warm-up
    while device != "cpu" and size < LARGEST_PRODUCT and _seconds(matrix) < FILLING_SECONDS:
        size *= 2  # to start a product takes an accelerator longer than a small one itself
        matrix = torch.ones(size, size, device=device)
        _seconds(matrix)
    # The best of several: whatever else runs on the machine only ever makes a product slower.
    spent, best = 0.0, math.inf
    while spent < PEAK_SECONDS:
        seconds = _seconds(matrix)
        spent, best = spent + seconds, min(best, seconds)
    return 2 * size**3 / best


def _seconds(matrix: torch.Tensor) -> float:
    started = time.perf_counter()
    # Reading one number waits for the device to finish.
    torch.mm(matrix, matrix)[0, 0].item()
    return time.perf_counter() - started


def _vector_flops(matrix_shape: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(matrix_shape)


def _addmv_flops(_added: Shape, matrix_shape: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(matrix_shape)


def _rnn_flops(input_shape: Shape, input_weight: Shape, hidden_weight: Shape, *_: Any, **__: Any) -> int:
    """One layer in one direction. The input is (time, batch, features); each step applies both weights once."""
    return 2 * input_shape[0] * input_shape[1] * (math.prod(input_weight) + math.prod(hidden_weight))


def _rnn_backward_flops(*shapes: Any, **__: Any) -> int:
    """Each product of the forward pass gives two: one for its input, one for its weight."""
    return 2 * _rnn_flops(*shapes)


def _attention_flops(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward_flops(gradient: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))


# torch 2.13 has no formula for these: on the CPU, recurrent layers and attention would count as nothing at all.
FORMULAS: dict[Any, Callable[..., int]] = {
    aten.mv: _vector_flops,
    aten.dot: _vector_flops,
    aten.vdot: _vector_flops,
    aten.addmv: _addmv_flops,
    aten.mkldnn_rnn_layer: _rnn_flops,
    aten.mkldnn_rnn_layer_backward: _rnn_backward_flops,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}

# What costs more than a few operations per element, by the names that torch gives to such operators. The `_thnn`
# cells of recurrent networks are element-wise: their matrix products run, and are counted, before them.
HEAVY = re.compile(
    r"(?!_thnn|upsample).*("
    r"linalg_(?!vector_norm|_powsum|cross|diagonal|check)|fft_[cr]2[cr]|cdist|cholesky|lu_solve|geqrf|ormqr|triangular_solve"
    r"|conv(?!ert)|attention|transformer|rnn|lstm|gru|trilinear|mkldnn_linear|sparse_mm|matmul|(mm|mv|dot|addr)_?$"
    r")"
)


def _is_uncounted(operator: Any) -> bool:
    """Whether an operator does work that no formula covers; of a foreign library's operator nothing is known."""
    if operator in flop_registry or operator in FORMULAS:
        return False
    namespace, _, name = operator._qualified_op_name.partition("::")
    return namespace not in ("aten", "prim", "prims", "profiler") or HEAVY.match(name) is not None


@leave_compiler_alone
class _OperatorNames(TorchDispatchMode):
    """Every operator that runs in the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[Any] = set()

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        self.seen.add(operator.overloadpacket)
        return operator(*arguments, **(options or {}))
