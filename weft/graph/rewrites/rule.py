"""A rule: an edit of an FX graph that keeps what the graph computes, to the bit or but for rounding."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, fx

__all__ = ["Edit", "Rule"]

Edit = Callable[[fx.Graph, dict[str, Tensor]], int]
"""Edits nodes and constants in place; returns how many changes it made, 0 where there is nothing left to do."""


@dataclass(frozen=True)
class Rule:
    """An edit with a name. One that is exact keeps every bit, but for the sign and payload of a NaN."""

    name: str
    edit: Edit
    is_exact: bool = True
