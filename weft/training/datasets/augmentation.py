"""Random crops and mirror images of a data set's samples."""

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.specs import Batch
from weft.training.datasets.dataset import AbstractDataset
from weft.training.datasets.draws import uniform

__all__ = ["Augmented"]

PADDING = 4  # pixels on every side, as in He et al. 2015, section 4.2


class Augmented(AbstractDataset):
    """Another data set of images, each shifted by up to four pixels and mirrored every second time.

    What happens to a sample is drawn from (seed, epoch, index), so it is the same on every rank and after a resume.
    The wrapped data set and what it caches stay as they are.
    """

    def __init__(self, dataset: AbstractDataset, seed: int = 0) -> None:
        self._dataset = dataset
        self._seed = seed

    def __len__(self) -> int:
        return len(self._dataset)

    def take(self, indices: Tensor, epoch: int = 0) -> Batch:
        batch = self._dataset.take(indices, epoch)
        down, right, mirror = (uniform(self._seed, epoch, indices, which) for which in range(3))
        num_places = 2 * PADDING + 1
        rows, columns = (down * num_places).long(), (right * num_places).long()
        return Batch((_crop(batch.inputs[0], rows, columns, mirror < 0.5), *batch.inputs[1:]), batch.targets)

    def checksum(self) -> str:
        return self._dataset.checksum()

    def lengths(self) -> Tensor | None:
        return self._dataset.lengths()

    def has_padding(self) -> bool:
        return self._dataset.has_padding()

    def num_targets(self, indices: Tensor) -> int:
        return self._dataset.num_targets(indices)

    def labels(self) -> Tensor | None:
        return self._dataset.labels()


def _crop(images_nchw: Tensor, rows_n: Tensor, columns_n: Tensor, mirror_n: Tensor) -> Tensor:
    num, _, height, width = images_nchw.shape
    padded = F.pad(images_nchw, (PADDING,) * 4)
    across_w = torch.arange(width)
    across_nw = torch.where(mirror_n[:, None], across_w.flip(0), across_w)
    y_nh1 = (rows_n[:, None] + torch.arange(height))[:, :, None]
    x_n1w = (columns_n[:, None] + across_nw)[:, None, :]
    # Advanced indices on both sides of a slice put the channels last.
    return padded[torch.arange(num)[:, None, None], :, y_nh1, x_n1w].permute(0, 3, 1, 2).contiguous()
