"""The linear layers at the end of models of several forms, and rules that say otherwise."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.distributed.group import AbstractGroup
from weft.distributed.placement.linear.placement import SplitLinearLayers
from weft.distributed.placement.linear.tail import find_links, tail_of
from weft.distributed.placement.rules import NO_RULES, Rules
from weft.distributed.virtual import run_virtual
from weft.errors import PlanError
from weft.training.placement import WholeModel


class Functional(nn.Module):
    """Layers are attributes, and what lies between them is functions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.fc1, self.fc2, self.fc3 = nn.Linear(8, 6), nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(F.relu(self.conv(x)), 1)
        x = F.dropout(F.relu(self.fc1(x)), 0.5, self.training)
        return F.log_softmax(self.fc3(torch.tanh(self.fc2(x))), dim=-1)


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = self.stem(x)
        found: Tensor = self.head(x)
        return found


def links_of(model: nn.Module) -> dict[str, tuple[str | None, bool]]:
    return {link.name: (link.follows, link.joint is not None) for link in find_links(model)}


def test_functions_between_layers_are_looked_into() -> None:
    """Dropout as a function draws for what it is given: there activations are not in parts."""
    assert links_of(Functional()) == {"fc1": (None, False), "fc2": (None, False), "fc3": ("fc2", True)}
    assert tail_of(find_links(Functional())) == ["fc2", "fc3"]


def test_norms_and_dropout_layers_are_part_of_a_tail() -> None:
    net = nn.Sequential(
        *(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU()),
        *(nn.Linear(6, 6), nn.Dropout(0.1), nn.Linear(6, 2)),
    )
    assert tail_of(find_links(net)) == ["2", "5", "7"]
    assert links_of(net) == {"2": (None, False), "5": ("2", False), "7": ("5", True)}
    assert [link.joint.dropouts for link in find_links(net) if link.joint] == [("6",)]


def test_a_model_that_cannot_be_traced_is_read_along_its_sequences() -> None:
    assert tail_of(find_links(Untraceable())) == ["head.0", "head.3"]
    assert links_of(Untraceable())["stem"] == (None, False)


def test_a_value_that_two_use_is_not_left_in_parts() -> None:
    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x).relu()
            found: Tensor = self.two(x) + x
            return found

    assert links_of(Forked())["two"] == ("one", False)


def split_layers(model: nn.Module, rules: Rules = NO_RULES) -> set[str]:
    def program(group: AbstractGroup) -> Any:
        placement = SplitLinearLayers(group, group, WholeModel(), rules)
        placement.place(model)
        names = [name for name, _ in model.named_parameters() if placement.cut_of(f"parameter/{name}")]
        return {name.removesuffix(".weight") for name in names if name.endswith("weight")}

    found: set[str] = run_virtual(program, 1).results[0]
    return found


def test_rules_by_hand_go_before_the_tail() -> None:
    assert split_layers(Untraceable()) == {"head.0", "head.3"}
    assert split_layers(Untraceable(), Rules((("stem", "split"), ("head.3", "data")))) == {"stem", "head.0"}
    assert split_layers(Untraceable(), Rules((("head", "data"), ("*", "split")))) == {"stem"}


@pytest.mark.parametrize("rule", [("conv", "split"), ("nothing.*", "split")])
def test_a_rule_for_no_linear_layer_is_refused(rule: tuple[str, str]) -> None:
    with pytest.raises(PlanError, match=rf"name of a rule \({rule[0]}".replace("*", r"\*")):
        split_layers(Functional(), Rules((rule,)))


def test_a_model_without_a_linear_tail_is_refused() -> None:
    with pytest.raises(PlanError, match=r"does not end in linear layers .*Conv2d, Linear, ReLU.*rules\.NAME=split"):
        split_layers(nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2, 1), nn.ReLU()))


def test_layers_that_share_a_weight_are_left_whole() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    net[0].weight = net[2].weight
    assert split_layers(net) == {"4"}
