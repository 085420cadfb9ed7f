"""Samplers: order (pure), partition (pure) and state (data)."""

from weft.training.sampling.catalogue import SAMPLERS
from weft.training.sampling.order import AbstractOrder, Bucketed, Ordered, Shuffled, Weighted
from weft.training.sampling.partition import deal, share, span, span_by_speed
from weft.training.sampling.sampler import Sampler, SamplerState

__all__ = [
    "SAMPLERS",
    "AbstractOrder",
    "Bucketed",
    "Ordered",
    "Sampler",
    "SamplerState",
    "Shuffled",
    "Weighted",
    "deal",
    "share",
    "span",
    "span_by_speed",
]
