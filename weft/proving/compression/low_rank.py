"""Low rank: PowerSGD, on all ranks at once and in float64.

    M_r = kept_r + w_r g_r;   P = an orthogonal basis of sum_r M_r Q;   Q = sum_r M_r' P
    sum = P Q';   kept_r = M_r - P P' M_r

The basis is that of a QR decomposition: it spans what Gram and Schmidt's spans, and P P' hangs on the span alone.
Where M_r Q have fewer directions than columns, the others of a basis are any; they add nothing to the sum if all of
M_r is in the span. A column of Q that has become 0 is drawn again.
"""

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from weft.proving.compression.compression import AbstractCompression
from weft.proving.compression.draws import key_of, uniform_at
from weft.proving.compression.messages import Message, Range
from weft.proving.compression.sender import Setting

__all__ = ["PowerSgd"]


@final
class PowerSgd(AbstractCompression):
    """Matrices that are larger than their factors; all else is sent as it is."""

    def __init__(self, setting: Setting) -> None:
        self._columns = int(setting.choice["rank"])
        self._kept: list[dict[str, Tensor]] = [{} for _ in range(setting.num_ranks)]
        self._rights: dict[str, Tensor] = {}

    @property
    def tolerance(self) -> float:
        """Products of float32, divided by what is small beside them: 1e-6 was seen."""
        return 1e-4

    def add_up(self, message: Message, values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        flats = [(own * weight).split(message.sizes) for own, weight in zip(values, weights, strict=True)]
        parts = [self._add_tensor(part, [own[i] for own in flats]) for i, part in enumerate(message.ranges)]
        return torch.cat(parts).to(values[0].dtype)

    def _add_tensor(self, part: Range, flats: Sequence[Tensor]) -> Tensor:
        if len(part.shape) < 2 or not self._is_smaller(part.shape[0], math.prod(part.shape[1:])):
            return torch.stack(list(flats)).double().sum(0)
        shape = part.shape[0], math.prod(part.shape[1:])
        matrices = [
            kept.get(part.name, torch.zeros(shape, dtype=torch.float64)) + flat.double().view(shape)
            for kept, flat in zip(self._kept, flats, strict=True)
        ]
        total = torch.stack(matrices).sum(0)
        basis = torch.linalg.qr(total @ self._right(part, shape[1])).Q
        self._rights[part.name] = total.T @ basis
        for kept, matrix in zip(self._kept, matrices, strict=True):
            kept[part.name] = matrix - basis @ (basis.T @ matrix)
        found: Tensor = basis @ (basis.T @ total)
        return found.view(-1)

    def _is_smaller(self, rows: int, columns: int) -> bool:
        return rows * columns > self._columns * (rows + columns)

    def _right(self, part: Range, columns: int) -> Tensor:
        """That of the step before; at first, and in place of a column of zeros, a draw from -1 to 1."""
        draws = uniform_at(key_of(Message((part,)), 0, 0), columns * self._columns)
        drawn = torch.from_numpy(draws).double().view(columns, self._columns) * 2 - 1
        right = self._rights.get(part.name)
        return drawn if right is None else torch.where(right.any(0), right, drawn)
