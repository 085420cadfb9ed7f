"""Models cut into stages: what stages compute together is what the model computes, in both modes, at any shape."""

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.distributed.placement.pipeline.cut_models import (
    Decides,
    Encoded,
    ResNet,
    Scaled,
    Skips,
    run_stages,
    set_training,
)
from weft.distributed.group import AbstractGroup
from weft.distributed.placement.pipeline.partition import partition, units_of
from weft.distributed.placement.pipeline.partition_cuts import best_cuts
from weft.distributed.placement.pipeline.stages import Partition
from weft.distributed.virtual import run_virtual
from weft.errors import GraphError, PlanError
from weft.specs import TaskSpec, TensorSpec
from weft.training.models import MODELS

TOKENS = torch.randint(0, 20, (4, 10), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def gpt(tied: bool) -> nn.Module:
    task = TaskSpec(TensorSpec((16,), torch.int64), 20)
    return MODELS["char_gpt"](task, width=16, num_layers=4, dropout=0.1, tied=tied)


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, Tensor]] = {
    "gpt": (lambda: gpt(tied=False), TOKENS, TOKENS[:3, :7]),
    "tied gpt": (lambda: gpt(tied=True), TOKENS, TOKENS[:3, :7]),
    "resnet": (ResNet, IMAGES, torch.randn(2, 3, 16, 16)),
    "skips": (Skips, torch.randn(4, 8), torch.randn(6, 8)),
    "encoder": (Encoded, TOKENS, TOKENS[:3, :7]),
}


def check_cut(cut: Partition, model: nn.Module, batch: Tensor) -> None:
    for is_training in (True, False):
        model.train(is_training)
        set_training(cut, is_training)
        torch.manual_seed(1)
        expected = model(batch)
        torch.manual_seed(1)
        torch.testing.assert_close(run_stages(cut, (batch,)), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_stages_compute_what_the_model_computes_at_every_shape(name: str, num_stages: int) -> None:
    make, batch, other = CASES[name]
    model = make()
    cut = partition(model, (batch,), num_stages)
    assert len(cut.stages) == num_stages
    check_cut(cut, model, batch)
    check_cut(cut, model, other)


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_and_buffer_keeps_its_name_and_has_one_home_but_for_tied_ones(name: str) -> None:
    model = CASES[name][0]()
    cut = partition(model, (CASES[name][1],), 3)
    for kind in ("named_parameters", "named_buffers"):
        held = [key for stage in cut.stages for key, _ in getattr(stage.module, kind)()]
        assert set(held) == {key for key, _ in getattr(model, kind)()}
        repeated = {key for key in held if held.count(key) > 1}
        assert repeated == (set(cut.tied) if kind == "named_parameters" else set())


def test_gradients_through_skips_are_those_of_the_model() -> None:
    model = Skips().eval()
    batch = torch.randn(4, 8, requires_grad=True)
    cut = partition(model, (batch.detach(),), 4)
    expected = torch.autograd.grad(model(batch).square().sum(), [batch, *model.parameters()])
    found = torch.autograd.grad(run_stages(cut, (batch,)).square().sum(), [batch, *model.parameters()])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_value_for_two_stages_is_sent_once_and_one_for_nobody_not_at_all() -> None:
    cut = partition(Skips(), (torch.randn(4, 8),), 4)
    takers = [stage.inputs for stage in cut.stages]
    first = cut.stages[0].outputs
    assert len(first) == 1 and first[0] in takers[1] and first[0] in takers[2] and first[0] not in takers[3]
    assert "input/0" in takers[2]  # the batch, which every stage has
    assert cut.stages[3].outputs == ("output",)


def test_masks_are_made_again_in_every_stage_and_not_sent() -> None:
    cut = partition(Encoded(), (TOKENS,), 3)
    assert all(len(stage.outputs) == 1 for stage in cut.stages)
    assert all("input/0" in stage.inputs for stage in cut.stages[:2])


def test_tied_weights_are_named_with_their_stages_and_come_with_their_layer() -> None:
    cut = partition(gpt(tied=True), (TOKENS,), 3)
    assert cut.tied == {"tokens.weight": (0, 2)}
    assert isinstance(cut.stages[2].module.get_submodule("tokens"), nn.Embedding)
    assert partition(Encoded(), (TOKENS,), 3).tied == {"embedding.weight": (0, 2)}


def test_the_model_is_left_as_it_was() -> None:
    model = ResNet().eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    partition(model, (IMAGES,), 2, "time")
    assert not any(part.training for part in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_list_of_modules_needs_no_batch_and_a_model_that_decides_by_size_does() -> None:
    model = ResNet()
    check_cut(partition(model, None, 3), model, IMAGES)
    with pytest.raises(GraphError, match=r"cannot be cut without a batch.*give sample inputs"):
        partition(gpt(tied=True), None, 2)


def test_a_decision_by_values_is_refused() -> None:
    with pytest.raises(GraphError, match=r"decides by the values of a tensor.*Tensor.bool"):
        partition(Decides(), (torch.randn(4, 8),), 2)


def test_a_size_that_no_cut_can_follow_is_refused() -> None:
    with pytest.raises(GraphError, match="sizes in it that a cut cannot follow"):
        partition(Scaled(), (torch.randn(4, 8),), 2)


def test_more_stages_than_units_and_stages_without_parameters_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with pytest.raises(PlanError, match=r"more stages than units.*\(stages: 3, units: 2\)"):
        partition(model, (torch.randn(2, 8),), 3)
    with pytest.raises(PlanError, match=r"stage has no parameters \(stage 0: 0\); use pipeline=1"):
        partition(nn.Sequential(nn.ReLU(), nn.ReLU()), (torch.randn(2, 8),), 1)


def test_a_memory_that_is_too_small_is_refused_and_a_tight_one_moves_the_cut() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))
    costs = [9.0, 1.0, 1.0, 1.0]  # alone, these would cut after the first
    free = partition(model, (torch.randn(2, 16),), 2, costs)
    tight = partition(model, (torch.randn(2, 16),), 2, costs, memory=4 * 2 * 16 * 16 * 4 + 2 * 2 * 3 * 16 * 4)
    assert [len(list(s.module.parameters())) for s in free.stages] == [1, 3]
    assert [len(list(s.module.parameters())) for s in tight.stages] == [2, 2]
    with pytest.raises(PlanError, match="no cut fits the memory"):
        partition(model, (torch.randn(2, 16),), 2, memory=1000.0)


def test_a_faster_stage_gets_more() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    cut = partition(model, (torch.randn(2, 16),), 2, speeds=[2.0, 1.0])
    assert [len(list(stage.module.parameters())) for stage in cut.stages] == [8, 4]
    with pytest.raises(PlanError, match="every stage has its speed"):
        partition(model, (torch.randn(2, 16),), 2, speeds=[1.0])


def test_ranks_that_measure_differently_cut_as_rank_0_does() -> None:
    def work(group: AbstractGroup) -> list[int]:
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
        costs = [float(1 + group.rank * number) for number in range(6)]
        cut = partition(model, (torch.randn(2, 16),), 2, costs, group=group)
        return [len(list(stage.module.parameters())) for stage in cut.stages]

    assert run_virtual(work, 2).results == ([6, 6], [6, 6])


def test_measured_times_are_of_every_unit() -> None:
    units = units_of(ResNet(), (IMAGES,), 3, "time")
    assert [unit.name for unit in units][:4] == ["conv1", "bn1", "layer1.0", "layer1.1"]
    assert all(unit.cost > 0 and unit.activations > 0 for unit in units)


@given(st.lists(st.integers(0, 20), min_size=3, max_size=9), st.integers(1, 3))
def test_the_slowest_stage_is_as_fast_as_any_cut_makes_it(costs: list[int], num_stages: int) -> None:
    def slowest(cuts: tuple[int, ...]) -> int:
        places = (0, *cuts, len(costs))
        return max(sum(costs[a:b]) for a, b in pairwise(places))

    found = best_cuts(costs, [1.0] * num_stages)
    assert found is not None
    assert slowest(found) == min(map(slowest, combinations(range(1, len(costs)), num_stages - 1)))


def test_of_cuts_that_are_as_fast_the_one_with_fewer_bytes_is_taken() -> None:
    assert best_cuts([1, 1, 0, 1, 1], [1, 1], carried=[0, 9, 9, 2, 9]) == (3,)


def test_a_cut_that_loses_a_skip_is_seen() -> None:
    """The fault that the comparison of stages with their model is there to find."""
    model = Skips().eval()
    cut = partition(model, (torch.randn(4, 8),), 4)
    third = cut.stages[2]
    swapped = replace(third, inputs=(third.inputs[0], *reversed(third.inputs[1:])))
    broken = replace(cut, stages=(*cut.stages[:2], swapped, cut.stages[3]))
    with pytest.raises(AssertionError):
        check_cut(broken, model, torch.randn(4, 8))
