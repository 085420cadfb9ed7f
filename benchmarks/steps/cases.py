"""What is trained: a model, its data, all of it random and the same in every process."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from weft.specs import TaskSpec, TensorSpec
from weft.training.models import char_gpt, mlp, resnet

__all__ = ["BATCH_SIZE", "CASES", "Case", "loss_of", "make_optimizer"]

BATCH_SIZE = 32  # per rank
NUM_SAMPLES = 2048
NUM_CLASSES = 10
VOCABULARY, LENGTH = 65, 64


@dataclass(frozen=True)
class Case:
    """A model and its data; both begin with the same seed."""

    name: str
    build: Callable[[], nn.Module]
    make_data: Callable[[int], tuple[Tensor, Tensor]]

    def make_model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()

    def make_dataset(self) -> TensorDataset:
        torch.manual_seed(1)
        return TensorDataset(*self.make_data(NUM_SAMPLES))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy, over samples or over all tokens of all samples."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def make_optimizer(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _images(*shape: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda count: (torch.randn(count, *shape), torch.randint(NUM_CLASSES, (count,)))


def _text(count: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (count, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def _task(shape: tuple[int, ...], dtype: torch.dtype, num_outputs: int) -> TaskSpec:
    return TaskSpec(TensorSpec(shape, dtype), num_outputs)


CASES = {
    case.name: case
    for case in (
        Case("mlp", lambda: mlp(_task((784,), torch.float32, 10), hidden=(3072, 3072, 3072)), _images(784)),
        Case("small mlp", lambda: mlp(_task((64,), torch.float32, 10), hidden=(128,)), _images(64)),
        Case("resnet20", lambda: resnet(_task((3, 32, 32), torch.float32, 10)), _images(3, 32, 32)),
        Case(
            "gpt",
            lambda: char_gpt(_task((LENGTH,), torch.int64, VOCABULARY), width=128, num_layers=4, num_heads=4),
            _text,
        ),
    )
}
