"""Experts on several ranks against all of them on one rank, and faults that the comparison must find."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.placement.expert.cases import prove_experts, replicas_of, small_moe
from tests.proving.test_lockstep import case_of, splits_of
from weft.distributed.group import AbstractGroup
from weft.distributed.placement.expert import all_to_all, placement, token_exchange
from weft.distributed.placement.weighting import Weighting
from weft.distributed.virtual import run_virtual
from weft.specs import Axis
from weft.training.build import build_task
from weft.training.evaluation import evaluate
from weft.training.models.experts import layer as layer_module


@pytest.mark.parametrize("plan", ["data=1 expert=2", "data=1 expert=4", "data=2 expert=2"])
def test_experts_on_several_ranks_are_those_of_one(plan: str) -> None:
    proof = prove_experts(small_moe(model__dropout=0.2), plan)
    assert proof.passed, proof.finding


PRODUCTS = (
    "data=1 shard=2 expert=2",
    "data=1 shard=2 expert=2 shard_level=3",
    "data=1 tensor=2 expert=2",
    "data=1 pipeline=2 expert=2 schedule=1f1b(2)",
)


@pytest.mark.parametrize("plan", PRODUCTS)
def test_experts_with_another_split_are_those_of_one_rank(plan: str) -> None:
    proof = prove_experts(small_moe(model__num_layers=2, batch_size=14, clip_norm=0.5), plan)
    assert proof.passed, proof.finding


def test_in_float32_to_rounding() -> None:
    proof = prove_experts(small_moe(), "data=1 expert=2", dtype=torch.float32)
    assert proof.passed and proof.largest_error > 1e-12, proof.finding


SETTINGS: dict[str, dict[str, Any]] = {
    "clipped by the norm of all experts": {"clip_norm": 0.05},
    "micro-batches, one rank with fewer samples than there are": {"batch_size": 5, "accumulate": 3},
    "tokens of a whole share": {"model__groups": "batch"},
    "one expert for a token, all of its tokens": {"model__top_k": 1, "model__capacity_factor": 0},
    "all experts for a token, no noise": {"model__top_k": 4, "model__noisy": False},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_whatever_the_recipe_says(settings: dict[str, Any]) -> None:
    proof = prove_experts(small_moe(**settings), "data=1 expert=2")
    assert proof.passed, proof.finding


def test_a_rank_without_samples_has_experts_all_the_same() -> None:
    splits = splits_of(small_moe().fixed.data)
    size = next(size for size in range(4, 200) if 0 < len(splits.train) % size < 4)
    proof = prove_experts(small_moe(batch_size=size), "data=1 expert=4")
    assert proof.passed, proof.finding


@pytest.mark.parametrize("size", [2, 4])
def test_evaluation_with_experts_elsewhere_gives_what_one_rank_gives(size: int) -> None:
    """Of seven batches: some ranks have none in the last round."""
    case = case_of(small_moe(data__sequence_length=14), f"data=1 expert={size}", 1)
    data = case.splits.validation

    def program(group: AbstractGroup) -> dict[str, float]:
        replicas = replicas_of(group, f"data=1 expert={size}")
        task, state = build_task(case.recipe, case.splits, 0, replicas)
        replicas.join(state.model)
        return evaluate(task.executor, state.model, data, ("accuracy",), replicas)

    task, state = build_task(case.recipe, case.splits, 0)
    alone = evaluate(task.executor, state.model, data, ("accuracy",))
    assert -(-len(data) // 256) == 7
    for found in run_virtual(program, size).results:
        assert found == pytest.approx(alone, rel=1e-6)


# ---- planted faults


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    assert prove_experts(small_moe(), "data=1 expert=2").passed
    yield monkeypatch


def is_found() -> bool:
    proof = prove_experts(small_moe(), "data=1 expert=2")
    return not proof.passed and "off by" in proof.finding


def test_tokens_that_come_back_in_another_order_are_found(clean: pytest.MonkeyPatch) -> None:
    clean.setattr(Tensor, "argsort", _argsort_once(Tensor.argsort))
    assert is_found()


def _argsort_once(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The order itself where its inverse is asked for, which alone is sorted without `stable`."""

    def argsort(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return original(tensor, *arguments, **options) if options else tensor

    return argsort


def test_a_gradient_that_does_not_travel_back_is_found(clean: pytest.MonkeyPatch) -> None:
    def keep(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        send_sizes, _ = ctx.sizes
        return None, gradient.new_zeros((sum(send_sizes), *gradient.shape[1:])), None, None

    clean.setattr(all_to_all._AllToAll, "backward", staticmethod(keep))
    assert is_found()


def test_gradients_of_experts_that_are_averaged_over_their_axis_are_found(clean: pytest.MonkeyPatch) -> None:
    """As if every rank held the same experts."""

    def everywhere(own: placement.ExpertParallel, name: str) -> tuple[Axis, ...]:
        return own._inner.reduced_over(name)

    clean.setattr(placement.ExpertParallel, "reduced_over", everywhere)
    proof = prove_experts(small_moe(), "data=1 expert=2")
    assert not proof.passed


def test_weights_that_come_too_late_are_found(clean: pytest.MonkeyPatch) -> None:
    """7 samples and 6: the experts get both as if they counted alike."""
    clean.setattr(Weighting, "value", property(lambda own: 0.5))
    assert is_found()


def test_auxiliary_losses_without_a_weight_are_found(clean: pytest.MonkeyPatch) -> None:
    apply: Any = layer_module._AddGradient.apply
    clean.setattr(layer_module._AddGradient, "apply", lambda out, auxiliary, weight: apply(out, auxiliary, 1.0))
    assert is_found()


def test_an_expert_that_computes_the_tokens_of_another_is_found(clean: pytest.MonkeyPatch) -> None:
    clean.setattr(token_exchange, "order_by_expert", lambda counts: torch.arange(int(counts.sum())))
    assert is_found()
