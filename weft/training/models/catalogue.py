"""The models that a recipe can name: `factory(task, *, options)`."""

from collections.abc import Callable, Mapping

from torch import nn

from weft.training.models.char_gpt import char_gpt
from weft.training.models.char_lstm import char_lstm
from weft.training.models.char_moe import char_moe
from weft.training.models.field_net import field_net
from weft.training.models.lenet import lenet
from weft.training.models.mlp import mlp
from weft.training.models.resnet import resnet
from weft.training.models.vgg import vgg

__all__ = ["MODELS"]

MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "char_gpt": char_gpt,
    "char_lstm": char_lstm,
    "char_moe": char_moe,
    "field_net": field_net,
    "lenet": lenet,
    "mlp": mlp,
    "resnet": resnet,
    "vgg": vgg,
}
