"""Level 0: operators, and the compiler behind those written in C++."""

from weft.operators.compile import compile_library, find_compiler

__all__ = ["compile_library", "find_compiler"]
