"""Copies of woven models: plain ones, that neither know of the ranks nor act on what they were copied from."""

import copy
import io
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from tests.distributed.script.loops import data_of
from tests.distributed.script.virtual_script import run_script
from weft.distributed.script.data.evaluation import EvaluationLoader
from weft.distributed.script.data.loaders import TrainingLoader
from weft.distributed.script.weaving.weave import weave
from weft.distributed.script.weaving.weaving import weavings_of
from weft.distributed.script.world.world import find_world


def through_pickle(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    found: nn.Module = torch.load(file, weights_only=False)
    return found


def averaged(model: nn.Module) -> nn.Module:
    found: nn.Module = AveragedModel(model).module
    return found


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "copy of a copy": lambda model: copy.deepcopy(copy.deepcopy(model)),
    "pickle": through_pickle,
    "pickle of a copy": lambda model: through_pickle(copy.deepcopy(model)),
    "average": averaged,
}


def copy_after_training(make_copy: Callable[[nn.Module], nn.Module], batch_norm: Literal["local", "global"]) -> Any:
    """Whether the copy computes what a plain model would, alone, in training mode; and what the original notices."""
    model: nn.Module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = weave(model, optimizer, DataLoader(data_of(16), 8), batch_norm=batch_norm)
    for x, y in loader:
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    own, plain = make_copy(model), nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    plain.load_state_dict(model.state_dict())
    own.load_state_dict(model.state_dict())
    assert not any(weaving._loaded for weaving in weavings_of(find_world()))
    if find_world().is_first:  # alone: nothing may wait for the other rank
        torch.testing.assert_close(own(x), plain(x), rtol=0, atol=0)
        own(x).sum().backward()
    model.load_state_dict(own.state_dict())
    return [weaving._loaded for weaving in weavings_of(find_world())]


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("batch_norm", ["local", "global"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_copy_of_a_woven_model_is_a_plain_one(
    make_copy: Callable[[nn.Module], nn.Module], batch_norm: Literal["local", "global"], size: int
) -> None:
    found = run_script(lambda: copy_after_training(make_copy, batch_norm), size)
    assert found == [[{"model"}]] * size


@pytest.mark.parametrize("kind", [TrainingLoader, EvaluationLoader])
def test_a_copy_of_a_loader_that_is_being_made_asks_for_nothing(kind: Any) -> None:
    with pytest.raises(AttributeError, match="_loader"):
        kind.__new__(kind).dataset  # noqa: B018
