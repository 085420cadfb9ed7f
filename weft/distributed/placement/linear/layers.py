"""Linear layers of which each rank has a part, for the samples of all ranks, and dropout between them.

conv, own samples | own -> whole | columns -- relu -- dropout -- | part -> whole | columns -- ... rows | sum -> own
                                              bits of one rank
"""

from dataclasses import dataclass
from math import prod
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.distributed.group.group import AbstractGroup
from weft.distributed.placement.linear.moves import Deal, move
from weft.distributed.placement.linear.ways import Way
from weft.distributed.placement.weighting import scale_gradient
from weft.errors import UsageError
from weft.training.sampling import span
from weft.training.weighting import Weighting

__all__ = ["Chain", "PartDropout", "SplitLinear", "deal_out"]


def deal_out(num_features: int, num_ranks: int) -> tuple[int, ...]:
    """Features of each rank: as equal as can be.

    >>> deal_out(10, 4)
    (3, 3, 2, 2)
    """
    spans = [span(num_features, rank, num_ranks) for rank in range(num_ranks)]
    return tuple(part.stop - part.start for part in spans)


@final
class Chain:
    """The samples that go through consecutive layers together: how many each rank has, in the forward that runs.

    Args:
        weighting: says whether gradients of parts are averaged over more ranks than have them.
    """

    def __init__(self, group: AbstractGroup, weighting: Weighting) -> None:
        self.group = group
        self.weighting = weighting
        self.is_whole = False  # every rank has all of the layers for now
        self.leading: tuple[int, ...] = ()  # dimensions of this rank's samples before that of features
        self._rows: tuple[int, ...] = ()

    def enter(self, tensor: Tensor) -> Tensor:
        """[samples, features], when all ranks have told how many they have."""
        if tensor.dim() < 2:
            raise UsageError(f"split layer needs samples along a dimension (shape: {tuple(tensor.shape)}); add one")
        self.leading = tuple(tensor.shape[:-1])
        rows = tensor.reshape(self.leading[0] * prod(self.leading[1:]), tensor.shape[-1])
        counts = torch.empty(self.group.size, dtype=torch.int64)
        self.group.all_gather(counts, torch.tensor([len(rows)]))
        self._rows = tuple(counts.tolist())
        return rows

    def leave(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(*self.leading, tensor.shape[-1])

    def deal(self, num_features: int) -> Deal:
        return Deal(self.group, self._rows, deal_out(num_features, self.group.size))


@dataclass(frozen=True)
class SplitLinear:
    """The forward of a linear layer of which this rank has a part.

    Args:
        is_first: of its chain.
    """

    chain: Chain
    way: Way
    num_inputs: int
    num_outputs: int
    is_first: bool

    @property
    def dims(self) -> dict[str, int]:
        """Those in which parameters are cut; one that is not named is whole. A bias that is added where each rank has
        its own samples again is whole."""
        if self.way.split == "columns":
            return {"weight": 0, "bias": 0}
        return {"weight": 1, "bias": 0} if self.way.after == "part" else {"weight": 1}

    def forward(self, layer: nn.Linear, tensor: Tensor) -> Tensor:
        chain, way = self.chain, self.way
        if chain.is_whole:
            return F.linear(tensor, layer.weight, layer.bias)
        tensor = chain.enter(tensor) if self.is_first else tensor
        if way.before == "own" and not self.is_first:
            tensor = tensor.reshape(prod(chain.leading), self.num_inputs)
        inputs, outputs = chain.deal(self.num_inputs), chain.deal(self.num_outputs)
        weight, bias = self._own(layer, "weight"), self._own(layer, "bias")
        assert weight is not None, "every linear layer has one"
        if way.split == "columns":
            tensor = F.linear(move(tensor, inputs, way.before, "whole"), weight, bias)
            tensor = move(tensor, outputs, "part", way.after)
        else:
            tensor = F.linear(move(tensor, inputs, way.before, "part"), weight)
            tensor = move(tensor, outputs, "sum", way.after)
            tensor = tensor if bias is None else tensor + bias
        return chain.leave(tensor) if way.after == "own" else tensor

    def _own(self, layer: nn.Linear, name: str) -> Tensor | None:
        """A part's gradient is of the samples of all ranks already: to be averaged with nobody along this axis."""
        parameter: Tensor | None = getattr(layer, name)
        if parameter is None or not self.chain.weighting.averages or name not in self.dims:
            return parameter
        scaled: Tensor = scale_gradient(parameter, 1.0 / self.chain.group.size)
        return scaled


@dataclass(frozen=True)
class PartDropout:
    """The forward of dropout where activations are in parts. Every rank draws for its own samples, all features, as it
    would with the layers whole, and sends each rank the part of the mask that is for its features, a byte each."""

    chain: Chain
    num_features: int

    def forward(self, layer: nn.Dropout, tensor: Tensor) -> Tensor:
        if not layer.training or layer.p == 0.0:
            return tensor
        chain = self.chain
        if chain.is_whole:
            return F.dropout(tensor, layer.p)
        ones = torch.ones(*chain.leading, self.num_features, dtype=tensor.dtype, device=tensor.device)
        # With a gradient where the whole has one: torch has two ways to draw, of which this chooses.
        drawn = F.dropout(ones.requires_grad_(tensor.requires_grad), layer.p).detach()
        kept = (drawn != 0).to(torch.uint8).view(prod(chain.leading), self.num_features)
        mask = move(kept, chain.deal(self.num_features), "own", "part")
        return tensor * mask * (1.0 / (1.0 - layer.p) if layer.p < 1.0 else 0.0)
