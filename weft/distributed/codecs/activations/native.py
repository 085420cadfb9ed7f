"""The compiled form of 8-bit encoding, bound through its C interface."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from weft.errors import CompilerError
from weft.operators.compile import compile_library

__all__ = ["load_library"]

_LONG, _POINTER = ctypes.c_int64, ctypes.c_void_p
_ARGUMENTS = {
    "weft_encode_eight_bit": [_POINTER, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER],
    "weft_decode_eight_bit": [_POINTER, _POINTER, _LONG, _LONG, _POINTER, _POINTER],
}


@cache
def load_library() -> dict[str, Any] | None:
    """The functions, compiled at the first use; None where there is no compiler, and torch does the same."""
    try:
        library = ctypes.CDLL(str(compile_library([Path(__file__).with_name("eight_bit.cpp")])))
    except CompilerError:
        return None
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = None, arguments
    return {name: getattr(library, name) for name in _ARGUMENTS}
