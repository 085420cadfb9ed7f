"""A small GPT for characters whose blocks have experts in the place of a feed-forward part."""

from typing import Literal

from torch import nn

from weft.errors import RecipeError
from weft.specs import TaskSpec
from weft.training.models.char_gpt import build_gpt
from weft.training.models.checks import check_positive, check_token_task
from weft.training.models.experts import MixtureOfExperts

__all__ = ["char_moe"]


def char_moe(
    task: TaskSpec,
    *,
    width: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    dropout: float = 0.0,
    tied: bool = True,
    num_experts: int = 8,
    top_k: int = 2,
    hidden: int = 128,
    capacity_factor: float = 1.25,
    balance: float = 0.01,
    noisy: bool = True,
    groups: Literal["sample", "batch"] = "sample",
) -> nn.Module:
    """Tokens [batch, length] -> logits of the next token [batch, length, num_outputs]; up to the task's length.

    Args:
        width: of every layer, cut among the heads.
        num_layers: blocks of attention and experts.
        dropout: the share of values that training leaves out.
        tied: whether the embedding also serves as the weight of the output layer.
        num_experts: of each block.
        top_k: experts of each token.
        hidden: the width inside of each expert.
        capacity_factor: an expert takes so many times its even share of a sample's tokens at most; 0 for all.
        balance: the weight of the importance loss and of the load loss.
        noisy: whether training draws noise for the gate.
        groups: what capacity and balance count over: the tokens of each sample, or of a rank's share of a batch.
    """
    check_token_task(task, "char_moe")
    check_positive(num_experts=num_experts, top_k=top_k, hidden=hidden)
    if top_k > num_experts:
        numbers = f"top_k: {top_k}, num_experts: {num_experts}"
        raise RecipeError(f"more experts for a token than there are ({numbers}); --set model.top_k={num_experts}")
    if capacity_factor < 0 or balance < 0:
        numbers = f"capacity_factor: {capacity_factor}, balance: {balance}"
        raise RecipeError(f"model option is negative ({numbers}); give 0 for none")

    def feed_forward() -> nn.Module:
        layer = MixtureOfExperts(
            width,
            hidden,
            num_experts,
            top_k=top_k,
            capacity_factor=capacity_factor or None,
            balance=(balance, balance),
            noisy=noisy,
            groups=groups,
        )
        return nn.Sequential(layer, nn.Dropout(dropout))

    return build_gpt(task, width, num_layers, num_heads, dropout, tied, feed_forward)
