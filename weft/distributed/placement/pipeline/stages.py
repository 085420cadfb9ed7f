"""A model cut into stages, as data: the interface between the cut and whoever runs it.

input/0 -> [ stage 0 ] -- h1 --> [ stage 1 ] -- h2 --> [ stage 2 ] -> output
                |                                          ^
                '------------------ skip ------------------'        sent straight to its consumer
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

__all__ = ["INPUT", "OUTPUT", "Partition", "StageProgram"]

INPUT = "input/"
"""Before the number of one of the batch's inputs, in the ids of values."""

OUTPUT = "output"
"""The id of the model's own output, the only one of the last stage."""


@dataclass(frozen=True)
class StageProgram:
    """One stage: a module, and the values that it takes and gives.

    Args:
        module: holds this stage's layers; its `named_parameters()` and `named_buffers()` have the whole model's names.
        inputs: ids of values in the order of the module's arguments; "input/0", "input/1" are the batch's.
        outputs: ids of the values that the module returns, as a tuple; the last stage's only one is "output".
    """

    module: nn.Module
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Partition:
    """All stages of a model in their order.

    Args:
        tied: of a parameter that several stages hold, by name, their numbers.
        firsts: of the units between which the model can be cut, the number of the first of each stage.
        layers: names of the units of each stage.
    """

    stages: tuple[StageProgram, ...]
    tied: Mapping[str, tuple[int, ...]]
    firsts: tuple[int, ...] = ()
    layers: tuple[tuple[str, ...], ...] = ()
