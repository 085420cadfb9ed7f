"""Checkpoints of experts on any number of ranks, loaded on any other; layers and plans that do not fit."""

from itertools import permutations
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.distributed.placement.expert.cases import replicas_of, small_moe
from tests.proving.test_lockstep import case_of
from tests.training.planted import ignore
from weft.distributed.group import AbstractGroup, SoloGroup
from weft.distributed.placement.expert import ExpertParallel
from weft.distributed.virtual import run_virtual
from weft.errors import PlanError
from weft.specs import as_plan
from weft.training.build import build_task
from weft.training.checkpoint import latest_checkpoint, write_checkpoint
from weft.training.loop import take_step
from weft.training.models import MixtureOfExperts
from weft.training.placement import WholeModel
from weft.training.results import hash_tensors
from weft.training.snapshot import ranks_of, restore, take_snapshot

PLANS = ("data=1", "data=1 expert=2", "data=1 expert=4", "data=2 expert=2")


def train_on(plan: str, folder: Path, *, loads: bool) -> list[str]:
    """One step, written down; or what was written last, loaded. The hash of model and momentum, whole, by rank."""
    case = case_of(small_moe(), plan, 1)

    def program(group: AbstractGroup) -> str:
        replicas = replicas_of(group, plan)
        task, state = build_task(case.recipe, case.splits, 0, replicas)
        replicas.join(state.model)
        if loads:
            snapshot = latest_checkpoint(folder, ignore, ranks_of(replicas))
            assert snapshot is not None
            state = restore(state, snapshot)
        else:
            state, _ = take_step(task, state)
            write_checkpoint(folder, take_snapshot(state, {}, replicas), ranks_of(replicas))
        held = {f"parameter/{name}": tensor for name, tensor in state.model.parameters.items()}
        for name, slots in state.optimizer.slots.items():
            held |= {f"slot/{name}/{slot}": tensor for slot, tensor in slots.items()}
        return hash_tensors(replicas.placement.whole(held))

    return list(run_virtual(program, as_plan(plan).num_ranks).results)


@pytest.mark.parametrize(("saved", "loaded"), [*permutations(PLANS, 2)])
def test_any_number_of_ranks_loads_what_any_other_saved(saved: str, loaded: str, tmp_path: Path) -> None:
    before = train_on(saved, tmp_path, loads=False)
    after = train_on(loaded, tmp_path, loads=True)
    assert len({*before, *after}) == 1


def test_a_rank_holds_its_experts_and_no_others() -> None:
    """In the same parameters, which an optimizer may know already."""

    def program(group: AbstractGroup) -> tuple[bool, dict[str, tuple[int, ...]]]:
        layer = MixtureOfExperts(3, 5, 4)
        before = list(map(id, layer.parameters()))
        ExpertParallel(group, group, WholeModel()).place(layer)
        shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
        return list(map(id, layer.parameters())) == before, shapes

    for is_same, shapes in run_virtual(program, 2).results:
        assert is_same and shapes["experts.weight_in"] == (2, 3, 5) and shapes["gate.weight"] == (4, 3)


def test_experts_that_cannot_be_split_are_named_with_the_nearest_split() -> None:
    model = nn.Sequential(nn.Linear(3, 3), MixtureOfExperts(3, 5, 4))
    found = run_virtual(lambda group: refusal_of(model, group), 3).results[0]
    assert found == "experts cannot be split in equal numbers (layer: 1, experts: 4, expert: 3); use expert=2"


def refusal_of(model: nn.Module, group: AbstractGroup) -> str:
    with pytest.raises(PlanError) as caught:
        ExpertParallel(group, group, WholeModel()).place(model)
    return str(caught.value)


def test_a_model_without_experts_is_refused() -> None:
    assert "no experts to split" in refusal_of(nn.Linear(3, 3), SoloGroup())


def test_an_optimizer_that_needs_whole_tensors_is_refused() -> None:
    placement = ExpertParallel(SoloGroup(), SoloGroup(), WholeModel())
    layer = placement.place(MixtureOfExperts(3, 5, 4))
    with pytest.raises(PlanError, match="needs whole tensors"):
        placement.take_over(torch.optim.Muon([layer.get_parameter("gate.weight")]), dict(layer.named_parameters()))
