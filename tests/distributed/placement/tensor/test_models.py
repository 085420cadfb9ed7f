"""Our own models, split over ranks: losses, gradients, running statistics and random numbers of one rank."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.placement.tensor.cases import (
    IMAGES,
    TOKENS,
    check_alike,
    error_of,
    images,
    run_on_one,
    run_on_parts,
    tokens,
)
from weft.distributed.placement.tensor import collectives, functions, linear, splitting
from weft.distributed.placement.tensor.region import Region
from weft.training.checkpoint import Cut
from weft.training.models import char_gpt, char_lstm, lenet, mlp, resnet


def cross_entropy(logits: Tensor) -> Tensor:
    labels = torch.arange(logits.flatten(0, -2).shape[0]) % logits.shape[-1]
    return F.cross_entropy(logits.flatten(0, -2), labels)


def small_mlp() -> nn.Module:
    return mlp(IMAGES, hidden=(32, 11, 8), dropout=0.3)


def small_gpt() -> nn.Module:
    return char_gpt(TOKENS, width=24, num_heads=6, num_layers=2, dropout=0.3)


MODELS = {
    "mlp": (small_mlp, images, ("1.weight", "1.bias", "4.weight", "7.weight", "7.bias", "10.weight")),
    "lenet": (lambda: lenet(IMAGES, channels1=5, dropout=0.2), images, ("0.weight", "0.bias", "3.weight", "7.weight")),
    "resnet": (lambda: resnet(IMAGES, depth=8, width=6), images, ("3.residual.0.weight", "3.residual.1.running_var")),
    "gpt, tied": (
        small_gpt,
        tokens,
        ("tokens.weight", "blocks.0.attention.qkv.bias", "blocks.1.feed_forward.2.weight"),
    ),
    "gpt": (lambda: char_gpt(TOKENS, width=12, num_heads=6, tied=False), tokens, ("tokens.weight", "head.weight")),
    "lstm": (lambda: char_lstm(TOKENS, num_layers=2, dropout=0.2), tokens, ("embedding.weight", "head.bias")),
}


@pytest.mark.parametrize("num_parts", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_parts_gives_what_it_gives_whole(name: str, num_parts: int) -> None:
    make, inputs, split = MODELS[name]
    assert set(split) <= set(check_alike(make, inputs(), cross_entropy, num_parts=num_parts))


@pytest.mark.parametrize("name", MODELS)
def test_so_it_does_in_single_precision(name: str) -> None:
    make, inputs, _ = MODELS[name]
    check_alike(make, inputs(), cross_entropy, dtype=torch.float32, tolerance=5e-6)


def found_error(num_parts: int = 2) -> float:
    expected = run_on_one(small_gpt, tokens(), cross_entropy, torch.float64)
    return error_of(run_on_parts(small_gpt, tokens(), cross_entropy, torch.float64, num_parts)[0], expected)


def test_a_missing_sum_in_a_backward_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        def wait(self) -> None:
            pass

    assert found_error() < 1e-10
    monkeypatch.setattr(linear, "start_sum", lambda x, group: Nothing())
    assert found_error() > 1e-3


def test_a_missing_sum_in_a_shared_copy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 8)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.copied, self.last = (
                nn.Linear(8, 8),
                nn.Conv1d(8, 6, 1, padding_mode="circular"),
                nn.Conv1d(6, 2, 1),
            )

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = self.last(self.copied(self.first(x).unsqueeze(-1)).relu())
            return hidden.flatten(1)

    from weft.distributed.placement.rules import Rules

    rules = Rules((("copied", "channels"), ("last", "row")))
    assert check_alike(Block, x, cross_entropy, rules=rules) == ("copied.weight", "copied.bias", "last.weight")
    monkeypatch.setattr(collectives, "sum_of", lambda x, group: x.clone())
    with pytest.raises(AssertionError):
        check_alike(Block, x, cross_entropy, rules=rules)


def test_a_wrong_slice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = splitting._cut_of

    def in_one_piece(tensor: Tensor, dim: int, fused: int, region: Region) -> Cut:
        """Queries, keys and values side by side, cut as if they were one matrix."""
        return right(tensor, dim, 1, region)

    monkeypatch.setattr(splitting, "_cut_of", in_one_piece)
    assert found_error() > 1e-3


def test_masks_of_parts_alone_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_STAND_INS", {})
    assert found_error() > 1e-3
