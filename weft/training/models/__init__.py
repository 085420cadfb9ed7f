"""Models for the recipes: each a function from a task and options to a module."""

from weft.training.models.catalogue import MODELS
from weft.training.models.char_gpt import char_gpt
from weft.training.models.char_lstm import char_lstm
from weft.training.models.char_moe import char_moe
from weft.training.models.experts import MixtureOfExperts, auxiliary_loss
from weft.training.models.field_net import field_net
from weft.training.models.lenet import lenet
from weft.training.models.mlp import mlp
from weft.training.models.resnet import resnet
from weft.training.models.vgg import vgg

__all__ = [
    "MODELS",
    "MixtureOfExperts",
    "auxiliary_loss",
    "char_gpt",
    "char_lstm",
    "char_moe",
    "field_net",
    "lenet",
    "mlp",
    "resnet",
    "vgg",
]
