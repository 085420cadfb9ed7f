"""Rules: by hand, by the tables, and what is refused; the bytes of the table are those that travel."""

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.placement.tensor.cases import TOKENS, check_alike
from weft.distributed.group import AbstractGroup
from weft.distributed.group.recording import RecordingGroup
from weft.distributed.placement.rules import NO_RULES, Rules
from weft.distributed.placement.tensor import LAYERS, TensorParallel
from weft.distributed.placement.tensor.pairing import find_splits
from weft.distributed.virtual import run_virtual
from weft.errors import PlanError, UsageError
from weft.training.models import char_gpt
from weft.training.placement import WholeModel


def three_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 5))


class Attention(nn.Module):
    """One that no table knows; the size of a head is fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.o((self.q(x) * self.k(x)).tanh())
        return out


def squares(y: Tensor) -> Tensor:
    return y.square().sum()


@pytest.mark.parametrize(
    ("rows", "split"),
    [
        ((("0", "column"), ("*", "whole")), {"0.weight", "0.bias"}),
        ((("2", "row"), ("*", "whole")), {"2.weight"}),
        ((("*", "column"),), {f"{i}.{name}" for i in (0, 2, 4) for name in ("weight", "bias")}),
        ((("*", "row"),), {"0.weight", "2.weight", "4.weight"}),
        ((("4", "vocabulary"),), {"0.weight", "0.bias", "2.weight", "4.weight", "4.bias"}),
        ((("0", "whole"),), {"2.weight", "2.bias", "4.weight"}),
    ],
)
def test_rules_by_hand(rows: tuple[tuple[str, str], ...], split: set[str]) -> None:
    assert set(check_alike(three_layers, torch.randn(4, 6), squares, rules=Rules(rows))) == split


def test_layers_beside_each_other_share_one_sum_of_gradients() -> None:
    rules = Rules((("q", "column"), ("k", "column"), ("o", "row")))
    assert len(check_alike(Attention, torch.randn(4, 8), squares, rules=rules)) == 4
    q, k, o = find_splits(Attention(), 2, rules).layers
    assert (q.shares_input, k.shares_input, o.shares_input) == (True, True, False)
    assert not (q.gathers or k.gathers)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ((("0", "channels"),), r"layer cannot be split as asked \(0: Linear, asked: channels\); ways .* column, row"),
        ((("0", "heads"),), r"layer cannot be split as asked \(0: Linear, asked: heads\)"),
        ((("fc", "column"),), r"no layer that could be split so .* \(fc: column\)"),
    ],
)
def test_what_cannot_be_done_by_hand_is_refused_by_name(rows: tuple[tuple[str, str], ...], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        find_splits(three_layers(), 2, Rules(rows))


def test_heads_that_cannot_be_dealt_out_are_refused_with_a_number_that_can() -> None:
    with pytest.raises(PlanError, match=r"blocks.0.attention: heads: 6, tensor: 4\); use tensor=3"):
        find_splits(char_gpt(TOKENS, width=24, num_heads=6), 4)


def test_what_is_not_known_is_left_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Bilinear(8, 8, 2), nn.Linear(2, 4))
    assert find_splits(model, 2).layers == ()


def test_a_model_of_which_nothing_can_be_split_is_refused() -> None:
    def program(group: AbstractGroup) -> None:
        TensorParallel(group, group, WholeModel()).place(nn.Linear(3, 3))

    with pytest.raises(PlanError, match=r"no layer of the model can be split \(model: Linear, tensor: 2\)"):
        run_virtual(program, 2)


def test_a_weight_that_another_layer_shares_is_left_whole_or_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.decoder = nn.Embedding(8, 4), nn.Bilinear(4, 4, 8)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.words.weight

    def program(group: AbstractGroup) -> None:
        rules = Rules((("words", "vocabulary"), ("head", "row")))
        TensorParallel(group, group, WholeModel(), rules=rules).place(Tied())

    with pytest.raises(PlanError, match="layer shares a weight with another that is not split in the same way"):
        run_virtual(program, 2)


@pytest.mark.parametrize("split", ["column", "row", "vocabulary"])
def test_the_table_tells_the_bytes_that_travel(split: str) -> None:
    rule = next(row for row in LAYERS if row.split == split and "Linear" in row.layer)
    inputs, outputs = (5, 6), (5, 10)

    def program(group: AbstractGroup) -> int:
        recording = RecordingGroup(group)
        model = nn.Sequential(nn.Linear(6, 10))
        placement = TensorParallel(recording, recording, WholeModel(), rules=Rules((("0", split),)))
        squares(placement.place(model)(torch.randn(inputs, requires_grad=True))).backward()
        return sum(recording.traffic.num_bytes.values())

    travels = [*rule.forward, *rule.backward]
    expected = sum(travel.num_bytes(inputs, outputs, 4, 2) for travel in travels)
    alone = {"column": 4 * 5 * 10 // 2, "row": 4 * 5 * 6 // 2, "vocabulary": 0}[split]  # gathered, or scattered
    assert set(run_virtual(program, 2).results) == {expected + alone}


def test_a_copy_of_a_split_model_is_split_and_a_pickle_is_refused() -> None:
    def program(group: AbstractGroup) -> None:
        model = TensorParallel(group, group, WholeModel(), rules=NO_RULES).place(three_layers())
        twin, x = copy.deepcopy(model), torch.ones(2, 6)
        assert torch.equal(twin(x), model(x))
        with torch.no_grad():
            twin.get_parameter("0.weight").zero_()
        assert not torch.equal(twin(x), model(x))
        with pytest.raises(UsageError, match=r"save it with weft\.save"):
            torch.save(model, "/dev/null")

    run_virtual(program, 2)
