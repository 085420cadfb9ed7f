"""Models of Hugging Face, as they are: attention by heads, Conv1D, tied words, relative positions, padding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.placement.tensor.cases import check_alike, images, tokens

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 37, "pad_token_id": 0}


class Trained(nn.Module):
    """A model with the loss that it computes itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        given = (
            {"pixel_values": x, "labels": torch.arange(len(x)) % 2} if x.dim() == 4 else {"input_ids": x, "labels": x}
        )
        loss: Tensor = self.model(**given).loss
        return loss


def gpt2(attention: str) -> nn.Module:
    about = {"n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 6, "bos_token_id": 1, "eos_token_id": 1}
    config = transformers.GPT2Config(**SMALL, **about, attn_implementation=attention, loss_type="ForCausalLM")
    return Trained(transformers.GPT2LMHeadModel(config))


def bert(attention: str) -> nn.Module:
    about = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 33}
    config = transformers.BertConfig(**SMALL, **about, max_position_embeddings=16, attn_implementation=attention)
    return Trained(transformers.BertForMaskedLM(config))


def t5(projection: str) -> nn.Module:
    about = {"d_model": 24, "d_kv": 4, "d_ff": 33, "num_layers": 2, "num_heads": 6, "feed_forward_proj": projection}
    config = transformers.T5Config(**SMALL, **about, decoder_start_token_id=0, eos_token_id=1)
    return Trained(transformers.T5ForConditionalGeneration(config))


def vit(dropout: float) -> nn.Module:
    about = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 33}
    config = transformers.ViTConfig(
        **about, image_size=8, patch_size=4, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )
    return Trained(transformers.ViTForImageClassification(config))


def loss_itself(loss: Tensor) -> Tensor:
    return loss


CASES: list[tuple[Callable[[Any], nn.Module], Any, Callable[[], Tensor], set[str], float]] = [
    (gpt2, "sdpa", tokens, {"transformer.wte.weight", "transformer.h.1.attn.c_attn.weight"}, 1e-10),
    (gpt2, "eager", tokens, {"transformer.h.0.mlp.c_proj.weight"}, 1e-10),
    (bert, "sdpa", tokens, {"bert.encoder.layer.0.attention.self.key.bias", "cls.predictions.bias"}, 1e-10),
    (bert, "eager", tokens, {"bert.embeddings.word_embeddings.weight"}, 1e-10),
    # Its norm is computed in single precision, whatever the model's.
    (
        t5,
        "relu",
        tokens,
        {"shared.weight", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"},
        1e-6,
    ),
    (t5, "gated-gelu", tokens, {"decoder.block.1.layer.2.DenseReluDense.wi_1.weight"}, 1e-6),
    (vit, 0.1, images, {"vit.layers.0.attention.q_proj.bias", "vit.layers.1.mlp.fc2.weight"}, 1e-10),
]


@pytest.mark.parametrize(("make", "option", "inputs", "split", "tolerance"), CASES)
def test_a_model_in_parts_gives_what_it_gives_whole(
    make: Callable[[Any], nn.Module], option: Any, inputs: Callable[[], Tensor], split: set[str], tolerance: float
) -> None:
    cuts = check_alike(lambda: make(option), inputs(), loss_itself, num_parts=2, tolerance=tolerance)
    assert {f"model.{name}" for name in split} <= set(cuts)


def test_three_ranks_share_words_and_features_unevenly() -> None:
    check_alike(lambda: gpt2("sdpa"), tokens(), loss_itself, num_parts=3)
