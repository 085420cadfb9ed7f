"""The 2-D heat equation as a regression problem: from a temperature field to the same field later.

    du/dt = d2u/dx2 + d2u/dy2  on the unit square, u = 0 on its edge

A sine mode sin(j pi x) sin(k pi y) only fades, by exp(-(j^2 + k^2) pi^2 t). So a field made of such modes has an
exact solution, and no solver's error is in the data.
"""

import math

import torch
from torch import Tensor

from weft.errors import UsageError
from weft.specs import TaskSpec, TensorSpec
from weft.training.datasets.arrays import ArrayDataset
from weft.training.datasets.dataset import Splits
from weft.training.datasets.draws import uniform
from weft.training.datasets.splitting import cut

__all__ = ["heat", "temperature"]

NUM_MODES = 4  # per direction


def heat(*, num_samples: int = 2560, grid: int = 16, time: float = 0.01, seed: int = 0) -> Splits:
    """Fields on the grid x grid inner points of the square, and what they are after `time`; cut 8 : 1 : 1.

    Inputs are (1, grid, grid), targets (grid * grid,). Time is in units of (side of the square)^2 / diffusivity.
    """
    if min(num_samples, grid) < 1 or time < 0:
        raise UsageError(
            f"no such heat problem (num_samples: {num_samples}, grid: {grid}, time: {time:g}); "
            "samples and grid are at least 1, time at least 0"
        )
    amplitudes = random_amplitudes(num_samples, seed)
    before, after = (temperature(amplitudes, grid, when).to(torch.float32) for when in (0.0, time))
    parts = cut(torch.arange(num_samples), (8, 1, 1))
    task = TaskSpec(TensorSpec((1, grid, grid)), grid * grid)
    return Splits("heat", task, *(ArrayDataset(before[part].unsqueeze(1), after[part].flatten(1)) for part in parts))


def random_amplitudes(num_samples: int, seed: int) -> Tensor:
    """The amplitude of every mode, float64 (samples, j, k): uniform in [-1, 1], less for the higher modes."""
    mode = torch.arange(1, NUM_MODES + 1)
    draws = uniform(seed, torch.arange(num_samples)[:, None, None], mode[:, None], mode)
    return (2 * draws - 1) * 2 / (mode[:, None] + mode)


def temperature(amplitudes: Tensor, grid: int, time: float) -> Tensor:
    """The exact field (samples, grid, grid) at the inner points x = i / (grid + 1), from amplitudes (samples, j, k)."""
    points = torch.arange(1, grid + 1, dtype=torch.float64) / (grid + 1)
    field = torch.zeros(len(amplitudes), grid, grid, dtype=torch.float64)
    # Summed one mode after the other, not by a matrix product, whose rounding depends on the machine.
    for j in range(1, amplitudes.shape[1] + 1):
        for k in range(1, amplitudes.shape[2] + 1):
            shape = torch.outer((j * math.pi * points).sin(), (k * math.pi * points).sin())
            fading = math.exp(-(j**2 + k**2) * math.pi**2 * time)
            field += amplitudes[:, j - 1, k - 1, None, None] * fading * shape
    return field
