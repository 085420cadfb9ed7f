"""Element-wise regions compiled to machine code that has the bits of ATen."""

from weft.graph.exact.fuse import fuse_exactly
from weft.graph.exact.kernel import bind_kernel, find_kernel

__all__ = ["bind_kernel", "find_kernel", "fuse_exactly"]
