"""Element-wise regions compiled to machine code that has the bits of ATen."""

from weft.graph.exact_fusion.fuse_exactly import fuse_exactly
from weft.graph.exact_fusion.kernel import bind_kernel, find_kernel

__all__ = ["bind_kernel", "find_kernel", "fuse_exactly"]
