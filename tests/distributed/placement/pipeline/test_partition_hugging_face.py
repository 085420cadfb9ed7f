"""Models of Hugging Face cut into stages, as they are."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.placement.pipeline.cut_models import run_stages, set_training
from weft.distributed.placement.pipeline.partition import partition

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(0, 30, (4, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(TOKENS).index_fill(1, torch.arange(8, 12), 0)
MASK[0] = 1


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=30, n_positions=16, n_embd=16, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32
    )
    model: nn.Module = transformers.BertForMaskedLM(config)
    return model


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=30, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    return model


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        image_size=16, patch_size=4, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32
    )
    model: nn.Module = transformers.ViTForImageClassification(config)
    return model


def shorter(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Fewer samples, and fewer tokens where there are tokens."""
    return {name: tensor[:3, :9] if tensor.ndim == 2 else tensor[:3] for name, tensor in batch.items()}


TEXT = {"input_ids": TOKENS}
CASES: dict[str, tuple[Callable[[], nn.Module], Mapping[str, Tensor], dict[str, tuple[int, ...]]]] = {
    "gpt2": (gpt2, TEXT, {"transformer.wte.weight": (0, 2)}),
    "gpt2 with padding": (gpt2, {**TEXT, "attention_mask": MASK}, {"transformer.wte.weight": (0, 2)}),
    "bert": (bert, {**TEXT, "attention_mask": MASK}, {"bert.embeddings.word_embeddings.weight": (0, 2)}),
    "t5": (t5, {**TEXT, "attention_mask": MASK, "decoder_input_ids": TOKENS[:, :10]}, {"shared.weight": (0, 1, 2)}),
    "vit": (vit, {"pixel_values": torch.randn(4, 3, 16, 16)}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_stages_compute_what_the_model_computes_at_every_shape(name: str) -> None:
    make, batch, tied = CASES[name]
    model = make()
    cut = partition(model, batch, 3)
    assert cut.tied == tied
    held = {key for stage in cut.stages for key, _ in stage.module.named_parameters()}
    assert held == {key for key, _ in model.named_parameters()}
    for given in (batch, shorter(batch)):
        for is_training in (True, False):
            model.train(is_training)
            set_training(cut, is_training)
            torch.manual_seed(1)
            expected = model(**given).logits
            torch.manual_seed(1)
            found = run_stages(cut, tuple(given.values())).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_cache_is_not_kept_and_the_setting_stays() -> None:
    model: Any = gpt2()
    assert model.config.use_cache
    cut = partition(model, TEXT, 2)
    assert model.config.use_cache
    assert "past_key_values" not in run_stages(cut, (TOKENS,))


def test_blocks_stay_modules_for_the_rules_of_tensor_parallelism() -> None:
    cut = partition(gpt2(), TEXT, 2)
    found = [
        name
        for stage in cut.stages
        for name, part in stage.module.named_modules()
        if type(part).__name__ == "GPT2Block"
    ]
    assert found == [f"transformer.h.{number}" for number in range(4)]
