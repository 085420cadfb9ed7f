"""Arguments of weave, refused in one process as on two ranks."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.script.virtual_script import run_script
from weft.distributed.script.weaving.weave import weave
from weft.distributed.script.weaving.weaving import weavings_of
from weft.distributed.script.world.world import find_world
from weft.errors import PlanError, UsageError


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(4, 2)), 2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def weave_two(**options: Any) -> None:
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    weave(models, [sgd(model) for model in models], loader(), **options)


def weave_one_of_two() -> None:
    models = nn.Linear(2, 1), nn.Linear(2, 1)
    weave(models[0], torch.optim.SGD([*models[0].parameters(), *models[1].parameters()], lr=0.1), loader())


def weave_again() -> None:
    model = nn.Linear(2, 1)
    weave(model, sgd(model), loader())
    weave(model, sgd(model), loader())


def weave_optimizer_again() -> None:
    model = nn.Linear(2, 1)
    optimizer = sgd(model)
    weave(model, optimizer, loader())
    weave(nn.ModuleList([model]), optimizer, loader())


def weave_twice_at_once() -> None:
    model = nn.Linear(2, 1)
    weave([model, model], None, loader())


def weave_one_parameter_twice() -> None:
    model = nn.Linear(2, 1)
    weave(model, [sgd(model), sgd(model)], loader())


def weave_swapped() -> None:
    model = nn.Linear(2, 1)
    weave(sgd(model), model, loader())  # type: ignore[call-overload]


WRONG: dict[str, tuple[Callable[[], None], type[Exception], str]] = {
    "no model": (lambda: weave([], None, None) and None, UsageError, "no model"),
    "swapped": (weave_swapped, UsageError, r"no module of torch.nn \(SGD\)"),
    "no optimizer": (lambda: weave(nn.Linear(1, 1), "sgd", None) and None, UsageError, r"none of torch.optim \(str\)"),  # type: ignore[arg-type]
    "one of two models": (weave_one_of_two, UsageError, r"no woven model has \(SGD: 2.*weave\(\[a, b\]"),
    "model again": (weave_again, UsageError, "model is woven already"),
    "optimizer again": (weave_optimizer_again, UsageError, "optimizer is woven already"),
    "same model": (weave_twice_at_once, UsageError, "same model twice"),
    "same parameter": (weave_one_parameter_twice, UsageError, r"same parameter \(weight\)"),
    "loss": (lambda: weave_two(loss="average"), UsageError, r"unknown loss \(loss: 'average'\)"),
    "batch norm": (lambda: weave_two(batch_norm="golbal"), UsageError, "did you mean 'global'"),
    "weight": (lambda: weave_two(weight=3), UsageError, "no function of a batch"),
    "sum and weight": (lambda: weave_two(loss="sum", weight=len), UsageError, "needs no weight"),
    "plan": (lambda: weave_two(plan="dta"), PlanError, "did you mean 'data'"),
    "plan that never makes sense": (lambda: weave_two(plan="data topology=neighbours"), PlanError, "not available"),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_argument_is_refused(wrong: str, size: int) -> None:
    script, error, text = WRONG[wrong]
    with pytest.raises(error, match=text):
        run_script(script, size)


@pytest.mark.parametrize("size", [1, 2])
def test_models_and_optimizers_come_back_as_they_were_given(size: int) -> None:
    def script() -> bool:
        models = [nn.Linear(2, 1), nn.Linear(2, 1)]
        optimizers = [sgd(model) for model in models]
        found = weave(models, optimizers, None)
        alone, other = nn.Linear(2, 1), (nn.Linear(2, 1),)
        return (
            found == (models, optimizers, None)
            and weave(alone, None, None) == (alone, None, None)
            and weave(other, None, None)[0] is other
        )

    assert all(run_script(script, size))


@pytest.mark.parametrize("plan", ["data consistency=local(8)", "data consistency=backup(3) topology=server", "shard"])
def test_a_script_with_a_plan_runs_in_one_process(plan: str) -> None:
    # Regression: one rank has nobody to agree with, and an unchanged script was refused.
    def script() -> str:
        model = nn.Linear(2, 1)
        weave(model, sgd(model), loader(), plan=plan)
        return str(weavings_of(find_world())[0].plan)

    assert run_script(script, 1) == ["data=1"]


def test_the_commands_plan_goes_before_the_scripts() -> None:
    def script() -> str:
        weave_two(plan="data=7 topology=ring")
        return str(weavings_of(find_world())[0].plan)

    assert run_script(script, 2, "data consistency=local(3)") == ["data=2 consistency=local(steps=3)"] * 2


def test_one_process_keeps_no_model_alive() -> None:
    def script() -> list[int]:
        found = []
        for _ in range(3):
            model = nn.Linear(2, 1)
            weave(model, sgd(model), None)
            found.append(len(weavings_of(find_world())))
            del model
            gc.collect()  # models and what watches them are a ring
        return found

    assert run_script(script, 1) == [[1, 1, 1]]
