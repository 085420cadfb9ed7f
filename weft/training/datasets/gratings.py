"""Made pictures: a class is a direction of waves, whatever their phase, colour and noise.

    class 0  ||||||     class 1  //////     class 2  ------     ...     directions over half a turn

For whoever needs pictures of some size and has none: no pixel alone tells a class, so that it takes convolutions.
"""

import math

import torch

from weft.errors import UsageError
from weft.specs import TaskSpec, TensorSpec
from weft.training.datasets.arrays import ArrayDataset
from weft.training.datasets.dataset import Splits
from weft.training.datasets.draws import uniform
from weft.training.datasets.splitting import cut

__all__ = ["gratings"]

NUM_WAVES = 4  # across a side
NOISE = 1.0  # uniform, from minus this to plus it; waves have amplitude 1


def gratings(
    *, num_samples: int = 2560, side: int = 32, channels: int = 3, num_classes: int = 10, seed: int = 0
) -> Splits:
    """Pictures (channels, side, side), the classes in turn; cut 8 : 1 : 1."""
    if min(num_samples, side, channels, num_classes) < 1:
        numbers = f"num_samples: {num_samples}, side: {side}, channels: {channels}, num_classes: {num_classes}"
        raise UsageError(f"no such pictures ({numbers}); all are at least 1")
    sample = torch.arange(num_samples)
    classes = sample % num_classes
    angle = math.pi * classes.double() / num_classes
    place = torch.arange(side, dtype=torch.float64) * (2 * math.pi * NUM_WAVES / side)
    along = angle.cos()[:, None, None] * place + angle.sin()[:, None, None] * place[:, None]
    waves = (along + 2 * math.pi * uniform(seed, sample, 0)[:, None, None]).sin()
    colours = uniform(seed, sample[:, None], 1 + torch.arange(channels))[:, :, None, None]
    pixel = torch.arange(channels * side * side).view(channels, side, side) + 1 + channels
    noise = (2 * uniform(seed, sample[:, None, None, None], pixel) - 1) * NOISE
    pictures = (waves[:, None] * colours + noise).to(torch.float32)
    task = TaskSpec(TensorSpec((channels, side, side)), num_classes)
    parts = cut(sample, (8, 1, 1))
    return Splits("gratings", task, *(ArrayDataset(pictures[part], classes[part]) for part in parts))
