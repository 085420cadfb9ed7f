"""The axis `expert`: ranks with different samples that hold some of the experts each, and send each other tokens."""

from weft.distributed.placement.expert.placement import ExpertParallel, make_expert

__all__ = ["ExpertParallel", "make_expert"]
