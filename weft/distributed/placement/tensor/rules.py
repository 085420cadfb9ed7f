"""How layers are split, and what travels because of it: tables, which a search can read.

LAYERS says it of one layer. BLOCKS says which layers of a known block go together, so that an activation stays in parts
from the first to the last of them:

    attention     query, key, value  by heads    |  output  by row        one all-reduce forward, one backward
    feed-forward  first  by column               |  second  by row        one all-reduce forward, one backward

A block is known by the path of its class; a new kind of model is a new row. Layers of nn.Sequential are paired without
one (pairing.py), and what nothing is known of is left whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Literal, get_args

from torch import nn

__all__ = ["BLOCKS", "LAYERS", "WORDS", "Block", "LayerRule", "Split", "Travel", "find_block", "find_rule", "splits_of"]

Split = Literal["column", "row", "heads", "vocabulary", "channels", "whole"]
"""column: by outputs. row: by inputs. heads: by outputs, whole heads at a time. channels: by output channels."""

WORDS: frozenset[str] = frozenset(get_args(Split)) | {"sequence", "space"}
"""Of rules by hand: ways to split one layer, and parts of sequences or pictures for all layers of a module."""

Layout = Literal["whole", "part"]


@dataclass(frozen=True)
class Travel:
    """A collective of one step: its kind, and the tensor of the whole layer that it is of."""

    call: Literal["all_reduce", "all_gather"]
    of: Literal["input", "output"]

    def num_bytes(self, input_shape: tuple[int, ...], output_shape: tuple[int, ...], itemsize: int, ranks: int) -> int:
        """That each rank hands to the transport: all of a tensor that is added up, its part of one that is gathered.

        >>> Travel("all_reduce", "output").num_bytes((8, 16), (8, 4), 4, 2)
        128
        """
        size = prod(input_shape if self.of == "input" else output_shape) * itemsize
        return size if self.call == "all_reduce" else -(-size // ranks)


@dataclass(frozen=True)
class LayerRule:
    """One way to split one kind of layer.

    Args:
        layer: a pattern for the path of its class.
        dims: the dim in which each of its tensors is cut; one that is not named is whole on every rank.
        takes: whether it needs its input whole, or this rank's part.
        gives: the same of its output; a part can be gathered, if what follows needs it whole.
        forward: what travels in a forward.
        backward: what travels in a backward, if the input needs a gradient.
    """

    layer: str
    split: Split
    dims: Mapping[str, int]
    takes: Layout = "whole"
    gives: Layout = "part"
    forward: tuple[Travel, ...] = ()
    backward: tuple[Travel, ...] = ()


_SUM_INPUT = (Travel("all_reduce", "input"),)
_SUM_OUTPUT = (Travel("all_reduce", "output"),)
_LINEAR, _CONV1D = "torch.nn.modules.linear.*Linear", "transformers.pytorch_utils.Conv1D"
_CONV, _NORM = "torch.nn.modules.conv.Conv?d", "torch.nn.modules.batchnorm.BatchNorm?d"
_EMBEDDING = "torch.nn.modules.sparse.Embedding"

LAYERS: tuple[LayerRule, ...] = (
    LayerRule(_LINEAR, "column", {"weight": 0, "bias": 0}, backward=_SUM_INPUT),
    LayerRule(_LINEAR, "heads", {"weight": 0, "bias": 0}, backward=_SUM_INPUT),
    LayerRule(_LINEAR, "row", {"weight": 1}, "part", "whole", forward=_SUM_OUTPUT),
    LayerRule(
        _LINEAR,
        "vocabulary",
        {"weight": 0, "bias": 0},
        "whole",
        "whole",
        forward=(Travel("all_gather", "output"),),
        backward=_SUM_INPUT,
    ),
    LayerRule(_CONV1D, "column", {"weight": 1, "bias": 0}, backward=_SUM_INPUT),
    LayerRule(_CONV1D, "heads", {"weight": 1, "bias": 0}, backward=_SUM_INPUT),
    LayerRule(_CONV1D, "row", {"weight": 0}, "part", "whole", forward=_SUM_OUTPUT),
    LayerRule(_EMBEDDING, "vocabulary", {"weight": 0}, "whole", "whole", forward=_SUM_OUTPUT),
    LayerRule(_EMBEDDING, "heads", {"weight": 1}),
    LayerRule(_CONV, "channels", {"weight": 0, "bias": 0}, backward=_SUM_INPUT),
    LayerRule(_CONV, "row", {"weight": 1}, "part", "whole", forward=_SUM_OUTPUT),
    LayerRule(_NORM, "channels", {"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0}, "part", "part"),
)


@dataclass(frozen=True)
class Block:
    """Layers of one kind of module that are split together.

    Args:
        path: a pattern for the path of the module's class.
        layers: from the names of layers, below the module, to how each is split.
        heads: the attribute that counts its heads, where it is attention.
        divided: attributes that are as many times smaller on a rank as there are ranks.
        held: parameters that the module holds itself for one of its layers, which has them too.
        output: the layer whose output is that of the module: a loss may take it in parts.
        takes_any_length: whether an attention takes its shapes from queries, keys and values, not from its input, so
            that a part of a sequence may come in.
    """

    path: str
    layers: Mapping[str, Split]
    heads: str = ""
    divided: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    output: str = ""
    takes_any_length: bool = False


_OURS, _HF = "weft.training.models", "transformers.models"

BLOCKS: tuple[Block, ...] = (
    Block(f"{_OURS}.char_gpt._CharGPT", {"tokens": "vocabulary", "head": "vocabulary"}, output="head"),
    Block(
        f"{_OURS}.char_gpt._Attention",
        {"qkv": "heads", "out": "row"},
        "num_heads",
        ("num_heads",),
        takes_any_length=True,
    ),
    Block(f"{_OURS}.char_lstm._CharLSTM", {"embedding": "vocabulary", "head": "vocabulary"}, output="head"),
    # GPT-2
    Block(
        f"{_HF}.gpt2.*.GPT2Attention",
        {"c_attn": "heads", "q_attn": "heads", "c_proj": "row"},
        "num_heads",
        ("num_heads", "split_size"),
        takes_any_length=True,
    ),
    Block(f"{_HF}.gpt2.*.GPT2MLP", {"c_fc": "column", "c_proj": "row"}),
    Block(f"{_HF}.gpt2.*.GPT2Model", {"wte": "vocabulary"}),
    Block(f"{_HF}.gpt2.*.GPT2LMHeadModel", {"lm_head": "vocabulary"}),
    # BERT
    Block(
        f"{_HF}.bert.*.BertAttention",
        {"self.query": "heads", "self.key": "heads", "self.value": "heads", "output.dense": "row"},
        "self.num_attention_heads",
        ("self.num_attention_heads", "self.all_head_size"),
    ),
    Block(f"{_HF}.bert.*.BertLayer", {"intermediate.dense": "column", "output.dense": "row"}),
    Block(f"{_HF}.bert.*.BertEmbeddings", {"word_embeddings": "vocabulary"}),
    Block(f"{_HF}.bert.*.BertLMPredictionHead", {"decoder": "vocabulary"}, held=("bias",)),
    # T5
    Block(
        f"{_HF}.t5.*.T5Attention",
        {"q": "heads", "k": "heads", "v": "heads", "o": "row", "relative_attention_bias": "heads"},
        "n_heads",
        ("n_heads", "inner_dim"),
    ),
    Block(f"{_HF}.t5.*.T5DenseActDense", {"wi": "column", "wo": "row"}),
    Block(f"{_HF}.t5.*.T5DenseGatedActDense", {"wi_0": "column", "wi_1": "column", "wo": "row"}),
    Block(f"{_HF}.t5.*.T5Stack", {"embed_tokens": "vocabulary"}),
    Block(f"{_HF}.t5.*.T5Model", {"shared": "vocabulary"}),
    Block(f"{_HF}.t5.*.T5ForConditionalGeneration", {"shared": "vocabulary", "lm_head": "vocabulary"}),
    # ViT
    Block(
        f"{_HF}.vit.*.ViTAttention",
        {"q_proj": "heads", "k_proj": "heads", "v_proj": "heads", "o_proj": "row"},
        "num_attention_heads",
        ("num_attention_heads",),
    ),
    Block(f"{_HF}.vit.*.ViTMLP", {"fc1": "column", "fc2": "row"}),
)
"""Attributes and layers that a module of the kind does not have are passed over."""


def find_block(module: nn.Module) -> Block | None:
    """The row for a module, by its class or one that it comes from."""
    paths = _paths_of(module)
    return next((block for path in paths for block in BLOCKS if fnmatchcase(path, block.path)), None)


def find_rule(module: nn.Module, split: Split) -> LayerRule | None:
    """How a layer is split as asked; None where that is not known."""
    paths = _paths_of(module)
    return next((row for row in LAYERS if row.split == split and any(fnmatchcase(p, row.layer) for p in paths)), None)


def splits_of(module: nn.Module) -> list[str]:
    """The ways in which a layer can be split.

    >>> splits_of(nn.Embedding(3, 4))
    ['heads', 'vocabulary']
    """
    paths = _paths_of(module)
    return sorted({row.split for row in LAYERS if any(fnmatchcase(path, row.layer) for path in paths)})


def _paths_of(module: nn.Module) -> list[str]:
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__]
