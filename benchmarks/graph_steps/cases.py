"""What is trained: four models, each with a small and a large batch, on random data."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.specs import TaskSpec, TensorSpec
from weft.training.models import char_gpt, char_lstm, mlp, resnet

__all__ = ["CASES", "LENGTH", "LR", "MOMENTUM", "VOCABULARY", "WIDTHS", "Case", "loss_of"]

BATCH_SIZES = (4, 64)
NUM_BATCHES = 4  # in turn
VOCABULARY, LENGTH = 65, 64
LR, MOMENTUM = 0.01, 0.9
WIDTHS = {"mlp": 1024, "lstm": 128, "gpt": 128}

PIXELS = TaskSpec(TensorSpec((784,)), 10)
IMAGE = TaskSpec(TensorSpec((3, 32, 32)), 10)
TEXT = TaskSpec(TensorSpec((LENGTH,), torch.int64), VOCABULARY)


@dataclass(frozen=True)
class Case:
    """A model and a batch size; model and data begin with the same seeds in every process."""

    model: str
    batch_size: int
    task: TaskSpec
    build: Callable[[], nn.Module]

    @property
    def name(self) -> str:
        return f"{self.model}, batch {self.batch_size}"

    def make_model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless: a few batches in turn."""
        generator = torch.Generator().manual_seed(1)
        return cycle([self._draw(generator) for _ in range(NUM_BATCHES)])

    def _draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        shape = self.batch_size, *self.task.input.shape
        if self.task.input.dtype.is_floating_point:
            labels = torch.randint(self.task.num_outputs, (self.batch_size,), generator=generator)
            return torch.randn(shape, generator=generator), labels
        tokens = torch.randint(VOCABULARY, (self.batch_size, LENGTH + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy, over samples or over all tokens of all samples."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _mlp() -> nn.Module:
    return mlp(PIXELS, hidden=(WIDTHS["mlp"], WIDTHS["mlp"]))


def _resnet() -> nn.Module:
    return resnet(IMAGE)


def _lstm() -> nn.Module:
    return char_lstm(TEXT, hidden=WIDTHS["lstm"])


def _gpt() -> nn.Module:
    return char_gpt(TEXT, width=WIDTHS["gpt"], num_layers=4, num_heads=4)


MODELS: dict[str, tuple[TaskSpec, Callable[[], nn.Module]]] = {
    "mlp": (PIXELS, _mlp),
    "resnet20": (IMAGE, _resnet),
    "lstm": (TEXT, _lstm),
    "gpt": (TEXT, _gpt),
}
CASES = {
    case.name: case
    for model, (task, build) in MODELS.items()
    for case in (Case(model, size, task, build) for size in BATCH_SIZES)
}
