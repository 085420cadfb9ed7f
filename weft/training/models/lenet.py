"""A convolutional network after LeNet-5 (LeCun et al., 1998), with ReLU and maximum pooling."""

from torch import nn

from weft.specs import TaskSpec
from weft.training.models.checks import check_dropout, check_image_task, check_positive

__all__ = ["lenet"]


def lenet(
    task: TaskSpec,
    *,
    channels1: int = 16,
    channels2: int = 32,
    hidden: int = 128,
    dropout: float = 0.0,
) -> nn.Module:
    """[batch, channels, height, width] -> [batch, num_outputs]: two 5 x 5 convolutions, each halving the sides, and two
    linear layers.

    Args:
        channels1: of the first convolution.
        channels2: of the second.
        hidden: the size of the linear layer before the last.
        dropout: the share of values that training leaves out before the last layer.
    """
    check_image_task(task, "lenet", least=4)
    check_positive(channels1=channels1, channels2=channels2, hidden=hidden)
    check_dropout(dropout)
    channels, height, width = task.input.shape
    return nn.Sequential(
        nn.Conv2d(channels, channels1, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels1, channels2, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(channels2 * (height // 4) * (width // 4), hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, task.num_outputs),
    )
