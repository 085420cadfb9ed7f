"""Parts of sequences between split layers: the same numbers, and gradients of norms that are added up."""

import pytest
import torch
from torch import nn

from tests.distributed.placement.tensor.cases import TOKENS, check_alike, tokens
from tests.distributed.placement.tensor.test_hugging_face import bert, gpt2, loss_itself
from tests.distributed.placement.tensor.test_models import cross_entropy, small_gpt
from weft.distributed.group import AbstractGroup
from weft.distributed.placement.rules import Rules
from weft.distributed.placement.tensor import TensorParallel
from weft.distributed.virtual import run_virtual
from weft.errors import PlanError
from weft.training.models import char_lstm
from weft.training.placement import WholeModel

BLOCKS = Rules((("blocks", "sequence"),))


@pytest.mark.parametrize("num_parts", [2, 3])
def test_blocks_on_parts_of_sequences(num_parts: int) -> None:
    cuts = check_alike(small_gpt, tokens()[:, :11], cross_entropy, num_parts=num_parts, rules=BLOCKS)
    assert "blocks.0.norm1.weight" not in cuts and "blocks.0.attention.qkv.weight" in cuts


def test_gpt2_on_parts_of_sequences() -> None:
    rules = Rules((("model.transformer.h.*", "sequence"),))
    check_alike(lambda: gpt2("sdpa"), tokens(), loss_itself, rules=rules)


def test_gradients_of_norms_that_are_not_added_up_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorParallel, "reduced_over", lambda self, name: ())
    with pytest.raises(AssertionError):
        check_alike(small_gpt, tokens(), cross_entropy, rules=BLOCKS)


@pytest.mark.parametrize(
    ("model", "glob", "told"),
    [
        (lambda: bert("sdpa"), "model.bert.encoder", "attention takes its shapes from its input"),
        (lambda: nn.Sequential(char_lstm(TOKENS)), "0", r"several positions.*\(0.lstm: LSTM\)"),
    ],
)
def test_layers_that_need_whole_sequences_are_refused_by_name(model: object, glob: str, told: str) -> None:
    def program(group: AbstractGroup) -> None:
        assert callable(model)
        TensorParallel(group, group, WholeModel(), rules=Rules(((glob, "sequence"),))).place(model())

    with pytest.raises(PlanError, match=told):
        run_virtual(program, 2)


def test_activations_between_layers_are_parts() -> None:
    def program(group: AbstractGroup) -> list[int]:
        torch.manual_seed(0)
        model, seen = small_gpt(), list[int]()
        placed = TensorParallel(group, group, WholeModel(), rules=BLOCKS).place(model)
        norms = [module for name, module in model.named_modules() if name.endswith("norm2")]
        for norm in norms:
            norm.register_forward_hook(lambda module, given, y: seen.append(y.shape[1]))
        placed(tokens())
        return seen

    assert list(run_virtual(program, 3).results) == [[4, 4]] * 3
