"""What generated code costs for each operator beside the operator itself.

The same calls, of 4 x 4 matrices, whose kernels take next to no time: from generated Python, and from a loop in C++
(the interpreter of TorchScript), which is as near as one comes to the bare call without compiling anything.
"""

import timeit
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.graph import PlannedProgram, Signature, capture
from weft.graph.programs.program import refuse

__all__ = ["measure_overhead"]

NUM_OPERATORS = 400
NUM_REPEATS, NUM_CALLS = 60, 5

_LOOP = """
def loop(x: Tensor, w: Tensor, a: Tensor, b: Tensor, n: int) -> Tensor:
    for i in range(n):
        torch.mm(x, w, out=a)
        torch.add(a, w, out=a)
        torch.mm(a, w, out=b)
        torch.add(b, w, out=b)
    return b
"""


def measure_overhead() -> dict[str, float]:
    """Nanoseconds per operator, each the least of many repetitions."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        generated = _nanoseconds(_generated())
        in_cpp = _nanoseconds(_in_cpp())
    finally:
        torch.set_num_threads(threads)
    return {"generated": generated, "in a loop in C++": in_cpp, "overhead": generated - in_cpp}


def _generated() -> Callable[[], Any]:
    def step(weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(NUM_OPERATORS // 2):
            x = torch.mm(x, weight).add(weight)
        return x.sum(), weight

    weight, x = torch.zeros(4, 4), torch.ones(4, 4)
    program = PlannedProgram(capture(step, weight, x), Signature(kept=("state",)))
    return lambda: program.run([weight, x], refuse, None)


def _in_cpp() -> Callable[[], Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        loop = torch.jit.CompilationUnit(_LOOP).loop
    tensors = [torch.zeros(4, 4) for _ in range(4)]

    def run() -> None:
        with torch.inference_mode():
            loop(*tensors, NUM_OPERATORS // 4)

    return run


def _nanoseconds(run: Callable[[], Any]) -> float:
    for _ in range(3):
        run()
    return 1e9 * min(timeit.repeat(run, number=NUM_CALLS, repeat=NUM_REPEATS)) / NUM_CALLS / NUM_OPERATORS
