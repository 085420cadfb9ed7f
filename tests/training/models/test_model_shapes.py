"""Counts of parameters against formulas and papers, and what the parts of a model may see."""

import pytest
import torch
from torch import Tensor, nn

from weft.specs import TaskSpec, TensorSpec
from weft.training.models import char_gpt, char_lstm, field_net, lenet, mlp, resnet

CIFAR10 = TaskSpec(TensorSpec((3, 32, 32)), 10)
TEXT = TaskSpec(TensorSpec((10,), torch.int64), 20)
FIELD = TaskSpec(TensorSpec((1, 9, 9)), 81)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_mlp_and_lenet_count() -> None:
    assert count(mlp(CIFAR10, hidden=(64, 32))) == (3072 + 1) * 64 + (64 + 1) * 32 + (32 + 1) * 10
    small = lenet(TaskSpec(TensorSpec((1, 28, 28)), 10), channels1=6, channels2=16, hidden=120)
    assert count(small) == (25 + 1) * 6 + (25 * 6 + 1) * 16 + (16 * 7 * 7 + 1) * 120 + (120 + 1) * 10


@pytest.mark.parametrize(
    ("depth", "num_parameters"),
    # He et al. (2016), table 6, in millions: 0.27, 0.46, 0.66, 0.85, 1.7.
    [(20, 269_722), (32, 464_154), (44, 658_586), (56, 853_018), (110, 1_727_962)],
)
def test_resnet_counts_of_the_paper(depth: int, num_parameters: int) -> None:
    assert count(resnet(CIFAR10, depth=depth)) == num_parameters
    shortcuts = (16 * 32 + 2 * 32) + (32 * 64 + 2 * 64)
    assert count(resnet(CIFAR10, depth=depth, shortcut="B")) == num_parameters + shortcuts


def test_resnet_depth_is_the_number_of_weighted_layers() -> None:
    layers = [m for m in resnet(CIFAR10, depth=26).modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == 26


def test_shortcut_a_takes_every_second_pixel_and_adds_channels_of_zeros() -> None:
    shortcut = resnet(CIFAR10, depth=8, width=2).get_submodule("4.shortcut")  # of the first block with stride 2
    x = torch.arange(2 * 5 * 5.0).view(1, 2, 5, 5)
    y = shortcut(x)
    assert y.shape == (1, 4, 3, 3)
    assert torch.equal(y[:, :2], x[:, :, ::2, ::2]) and not y[:, 2:].any()


def test_character_models_count() -> None:
    assert count(char_lstm(TEXT, embedding=8, hidden=16)) == 20 * 8 + 4 * 16 * (8 + 16 + 2) + (16 + 1) * 20
    width = 16
    block = 4 * (width + 1) * width + (width + 1) * 4 * width + (4 * width + 1) * width + 2 * 2 * width
    tied = 20 * width + 10 * width + 3 * block + 2 * width
    assert count(char_gpt(TEXT, width=width, num_layers=3)) == tied
    assert count(char_gpt(TEXT, width=width, num_layers=3, tied=False)) == tied + 20 * width


def first_changed_position(model: nn.Module, tokens: Tensor, position: int) -> int:
    """The first output that is not the same bits when the token at `position` is another."""
    other = tokens.clone()
    other[:, position] = (other[:, position] + 1) % 20
    model.eval()
    with torch.no_grad():
        changed = (model(tokens) != model(other)).any(dim=-1).any(dim=0)
    return int(changed.nonzero()[0])


@pytest.mark.parametrize("build", [char_lstm, char_gpt])
@pytest.mark.parametrize("position", [0, 4, 9])
def test_character_models_do_not_see_the_future(build: type, position: int) -> None:
    tokens = torch.randint(20, (3, 10))
    assert first_changed_position(build(TEXT), tokens, position) == position


def test_causality_check_finds_a_model_that_sees_the_future() -> None:
    class Cheat(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return tokens.roll(-1, dims=1)[:, :, None].float()

    assert first_changed_position(Cheat(), torch.randint(20, (3, 10)), 4) == 3


@pytest.mark.parametrize("build", [char_lstm, char_gpt])
def test_character_models_remember_the_past(build: type) -> None:
    model, tokens = build(TEXT).eval(), torch.randint(20, (3, 10))
    other = tokens.clone()
    other[:, 0] = (other[:, 0] + 1) % 20
    with torch.no_grad():
        assert not torch.equal(model(tokens)[:, -1], model(other)[:, -1])


def test_character_models_take_shorter_sequences() -> None:
    tokens = torch.randint(20, (3, 10))
    for model in (char_lstm(TEXT).eval(), char_gpt(TEXT).eval()):
        with torch.no_grad():
            torch.testing.assert_close(model(tokens[:, :4]), model(tokens)[:, :4])


def test_gpt_starts_at_the_loss_of_guessing() -> None:
    logits = char_gpt(TEXT)(torch.randint(20, (50, 10)))
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(20, (500,)))
    assert loss.item() == pytest.approx(torch.tensor(20.0).log().item(), abs=0.05)


def test_field_net_sees_as_far_as_it_says_and_starts_from_the_field() -> None:
    model = field_net(FIELD, num_layers=2, kernel_size=3)
    field = torch.zeros(1, 1, 9, 9)
    other = field.clone()
    other[0, 0, 4, 4] = 1
    with torch.no_grad():
        reach = (model(other) != model(field)).view(9, 9).nonzero()
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(model(other), other.flatten(1))
    assert reach.min() == 2 and reach.max() == 6
