"""Tensor parallelism: layers split over ranks, by rules that are data; see placement.py for the picture."""

from weft.distributed.placement.tensor.placement import TensorParallel, make_tensor
from weft.distributed.placement.tensor.rules import BLOCKS, LAYERS, WORDS

__all__ = ["BLOCKS", "LAYERS", "WORDS", "TensorParallel", "make_tensor"]
