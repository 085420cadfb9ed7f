"""Linear layers split over ranks that are data parallel in all others (Krizhevsky, 2014: "one weird trick")."""

from weft.distributed.placement.linear.placement import WORDS, SplitLinearLayers, make_linear

__all__ = ["WORDS", "SplitLinearLayers", "make_linear"]
