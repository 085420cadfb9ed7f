"""An operator written in C++ against `<weft/operator.h>`: plain pointers and sizes, compiled when first used.

A `.cu` file is given to nvcc where there is one and a GPU; that path has no test, for want of such a machine.
"""

import ctypes
import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from weft.atomic import write_text
from weft.errors import CompilerError, UsageError
from weft.operators.compile import FLAGS, cache_folder, compile_library
from weft.operators.cost import CostFormula
from weft.operators.definition import Definition, Samples
from weft.operators.operator import NAMESPACE, Operator, define

__all__ = ["cpp_operator"]

INCLUDE = Path(__file__).parent / "include"
HEADER = INCLUDE / "weft" / "operator.h"
# Unlike Weft's own kernels an operator need not have the bits of torch, so a * b + c may be one instruction.
CPP_FLAGS = (*FLAGS, "-ffp-contract=fast", "-fopenmp", f"-I{INCLUDE}")
CUDA_FLAGS = ("-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC", f"-I{INCLUDE}")

# In the order of weft::Type.
TYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
)
TYPE_CODES = {dtype: code for code, dtype in enumerate(TYPES)}


class _Tensor(ctypes.Structure):
    """weft::Tensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("rank", ctypes.c_int32),
        ("type", ctypes.c_int32),
    )


class _Attribute(ctypes.Structure):
    """weft::Attribute."""

    _fields_ = (("integer", ctypes.c_int64), ("real", ctypes.c_double))


class _Call(ctypes.Structure):
    """weft::Call."""

    _fields_ = (("attributes", ctypes.POINTER(_Attribute)), ("stream", ctypes.c_void_p))


def cpp_operator(
    source: Path | str,
    infer: Callable[..., Any],
    *,
    name: str | None = None,
    backward: bool = True,
    contiguous: bool = True,
    flags: Sequence[str] = (),
    samples: Samples | None = None,
    bench_samples: Samples | None = None,
    reference: Callable[..., Any] | None = None,
    cost: CostFormula | None = None,
) -> Operator:
    """Register an operator whose `forward` (and `backward`) are C++ functions.

    Args:
        source: a file (a Path), or the text of one.
        infer: its annotations are the operator's arguments and results; called with inputs it gives empty outputs,
            as in `def swish(x: Tensor, beta: float) -> Tensor: return torch.empty_like(x)`.
        backward: whether the source has a function `backward`.
        contiguous: copy inputs and gradients that are not contiguous first. Without, the source must heed strides.
        flags: more flags for the compiler.

    Raises:
        CompilerError: at first use, with what the compiler said.
    """
    full_name = name or f"{NAMESPACE}::{getattr(infer, '__name__', '')}"
    kernels = _Kernels(source, full_name, infer, contiguous, tuple(flags))
    definition = Definition(
        forward=kernels.forward,
        signature=infer,
        backward=kernels.backward if backward else None,
        infer=kernels.allocate,
        samples=samples,
        bench_samples=bench_samples,
        reference=reference,
        cost=cost,
        is_safe=False,  # a wrong shape would read past the end
    )
    origin = f"{infer.__module__}.{infer.__qualname__}"
    return define(definition, name=full_name, origin=origin, opaque_backward=True)


@dataclass(frozen=True)
class _Kernels:
    """The two functions of a compiled source, on tensors."""

    source: Path | str
    name: str
    infer: Callable[..., Any]
    contiguous: bool
    flags: tuple[str, ...]

    def allocate(self, *inputs: Any) -> Any:
        """Outputs without values; contiguous whatever the inputs are."""
        outputs = self.infer(*inputs)
        return tuple(map(_empty_like, outputs)) if isinstance(outputs, tuple) else _empty_like(outputs)

    def forward(self, *inputs: Any) -> Any:
        outputs = self.allocate(*inputs)
        flat = outputs if isinstance(outputs, tuple) else (outputs,)
        self._run("forward", [self._given(inputs), list(flat)], inputs)
        return outputs

    def backward(
        self, grads: tuple[Tensor, ...], inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, ...]:
        results = tuple(_empty_like(x) if isinstance(x, Tensor) and x.is_floating_point() else None for x in inputs)
        places = [r for r, x in zip(results, inputs, strict=True) if isinstance(x, Tensor)]
        self._run("backward", [self._given(grads), self._given(inputs), self._given(outputs), places], inputs)
        return results

    def _given(self, values: Sequence[Any]) -> list[Tensor | None]:
        tensors = [value for value in values if isinstance(value, Tensor)]
        return [tensor.contiguous() if self.contiguous else tensor for tensor in tensors]

    def _run(self, function: Literal["forward", "backward"], groups: list[list[Tensor | None]], inputs: Any) -> None:
        """Call into the library. `groups` keeps every tensor alive until the call is over, copies too."""
        run = _find_function(self.source, self.name, self.flags, function)
        call = _Call(_attributes(inputs, self.name), _stream(groups))
        pointers = [_describe(group, self.name) for group in groups]
        complaint = run(*pointers, ctypes.byref(call))
        if complaint is not None:
            types = [str(x.dtype) for x in inputs if isinstance(x, Tensor)]
            raise UsageError(f"operator refuses its inputs ({self.name}: {complaint.decode()}, types: {types})")


def _find_source(source: Path | str, name: str) -> Path:
    """The file of a source; a text is kept beside the compiled libraries, so that a debugger finds it."""
    if isinstance(source, Path):
        if not source.is_file():
            raise UsageError(f"no such file ({source}); give the path of a C++ source")
        return source.resolve()
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    path = cache_folder() / "sources" / f"{name.replace('::', '_')}-{digest}.cpp"
    if not path.exists():
        write_text(path, source)
    return path


@cache
def _find_function(source: Path | str, name: str, flags: tuple[str, ...], function: str) -> Any:
    """Compiled when first asked for."""
    library = _load(_find_source(source, name), flags)
    try:
        found = getattr(library, function)
    except AttributeError:
        raise UsageError(
            f"the source has no function of this name (operator: {name}, function: {function}); "
            "include <weft/operator.h> and write it, or say backward=False"
        ) from None
    found.restype = ctypes.c_char_p
    return found


def _load(source: Path, flags: tuple[str, ...]) -> ctypes.CDLL:
    if source.suffix == ".cu":
        library = compile_library([source, HEADER], flags=(*CUDA_FLAGS, *flags), compiler=_find_nvcc())
    else:
        library = compile_library([source, HEADER], flags=(*CPP_FLAGS, *flags))
    return ctypes.CDLL(str(library))


def _find_nvcc() -> str:
    path = shutil.which("nvcc")
    if path is None or not torch.cuda.is_available():
        lacking = "nvcc" if path is None else "a GPU"
        raise CompilerError(f"a CUDA source needs nvcc and a GPU (missing: {lacking}); give a C++ source instead")
    return path


def _describe(tensors: Sequence[Tensor | None], name: str) -> Any:
    array = (_Tensor * len(tensors))()
    for place, tensor in zip(array, tensors, strict=True):
        if tensor is None:
            continue
        if tensor.dtype not in TYPE_CODES:
            raise UsageError(f"type has no name in C++ (operator: {name}, type: {tensor.dtype}); convert the tensor")
        rank = tensor.dim()
        place.data, place.rank, place.type = tensor.data_ptr(), rank, TYPE_CODES[tensor.dtype]
        place.shape = (ctypes.c_int64 * rank)(*tensor.shape)
        place.strides = (ctypes.c_int64 * rank)(*tensor.stride())
    return array


def _attributes(inputs: Sequence[Any], name: str) -> Any:
    values = [value for value in inputs if not isinstance(value, Tensor)]
    for value in values:
        if not isinstance(value, (bool, int, float)):
            raise UsageError(f"C++ takes tensors and numbers (operator: {name}, value: {value!r}); pass a number")
    return (_Attribute * len(values))(*(_Attribute(_integer(value), float(value)) for value in values))


def _integer(value: float) -> int:
    return int(value) if isfinite(value) and abs(value) < 2**63 else 0


def _stream(groups: list[list[Tensor | None]]) -> int | None:
    is_on_gpu = any(tensor is not None and tensor.is_cuda for group in groups for tensor in group)
    return torch.cuda.current_stream().cuda_stream if is_on_gpu else None


def _empty_like(tensor: Tensor) -> Tensor:
    return tensor.new_empty(tensor.shape)
