"""A small GPT for characters: learned positions, normalisation before each sublayer, causal attention.

Shape suffixes: b batch, l length, w width, h heads, s size of a head (w = h * s), v vocabulary.
"""

import math
from collections.abc import Callable
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.errors import RecipeError, UsageError
from weft.specs import TaskSpec
from weft.training.models.checks import check_dropout, check_positive, check_token_task

__all__ = ["build_gpt", "char_gpt"]


def char_gpt(
    task: TaskSpec,
    *,
    width: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    dropout: float = 0.0,
    tied: bool = True,
) -> nn.Module:
    """Tokens [batch, length] -> logits of the next token [batch, length, num_outputs]; up to the task's length.

    Args:
        width: of every layer, cut among the heads.
        num_layers: blocks of attention and a linear part.
        dropout: the share of values that training leaves out.
        tied: whether the embedding also serves as the weight of the output layer.
    """
    check_token_task(task, "char_gpt")

    def feed_forward() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    return build_gpt(task, width, num_layers, num_heads, dropout, tied, feed_forward)


def build_gpt(
    task: TaskSpec,
    width: int,
    num_layers: int,
    num_heads: int,
    dropout: float,
    tied: bool,
    feed_forward: Callable[[], nn.Module],
) -> nn.Module:
    """A GPT of blocks with any part after the attention.

    Args:
        feed_forward: makes that part of a block.
    """
    check_positive(width=width, num_layers=num_layers, num_heads=num_heads)
    check_dropout(dropout)
    if width % num_heads:
        numbers = f"width: {width}, num_heads: {num_heads}"
        raise RecipeError(f"heads do not divide the width ({numbers}); --set model.width={num_heads * 16}")
    blocks = [_Block(width, num_heads, dropout, feed_forward) for _ in range(num_layers)]
    gpt = _CharGPT(task.num_outputs, task.input.shape[0], width, blocks, dropout, tied)
    _initialise(gpt, num_layers)
    return gpt


@final
class _CharGPT(nn.Module):
    def __init__(
        self, vocabulary: int, max_length: int, width: int, blocks: list["_Block"], dropout: float, tied: bool
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(max_length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.head = None if tied else nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens_bl: Tensor) -> Tensor:
        length, most = tokens_bl.shape[1], self.positions.num_embeddings
        if length > most:
            raise UsageError(f"sequence is longer than the model's context (length: {length}, context: {most})")
        x_blw = self.tokens(tokens_bl) + self.positions.weight[:length]
        x_blw = self.norm(self.blocks(self.dropout(x_blw)))
        return F.linear(x_blw, self.tokens.weight if self.head is None else self.head.weight)


@final
class _Block(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float, feed_forward: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = _Attention(width, num_heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = feed_forward()

    def forward(self, x_blw: Tensor) -> Tensor:
        after_blw: Tensor = x_blw + self.attention(self.norm1(x_blw))
        out_blw: Tensor = after_blw + self.feed_forward(self.norm2(after_blw))
        return out_blw


@final
class _Attention(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_blw: Tensor) -> Tensor:
        q_bhls, k_bhls, v_bhls = (
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x_blw).chunk(3, dim=-1)
        )
        share = self.dropout.p if self.training else 0.0
        mixed_bhls = F.scaled_dot_product_attention(q_bhls, k_bhls, v_bhls, dropout_p=share, is_causal=True)
        out_blw: Tensor = self.dropout(self.out(mixed_bhls.transpose(1, 2).flatten(2)))
        return out_blw


@torch.no_grad()
def _initialise(gpt: _CharGPT, num_layers: int) -> None:
    """GPT-2's: normal of 0.02, and less where 2 * num_layers contributions add up on the residual stream."""
    for name, parameter in gpt.named_parameters():
        if name.endswith(("bias", "bias_in", "bias_out", "gate.noise")):
            parameter.zero_()
        elif parameter.ndim > 1:
            is_residual = name.endswith(("attention.out.weight", "feed_forward.2.weight", "experts.weight_out"))
            parameter.normal_(std=0.02 / math.sqrt(2 * num_layers) if is_residual else 0.02)
