"""Stages against one rank: losses, gradients and parameters, for every schedule; and planted faults."""

import pytest
import torch
from torch import Tensor

from tests.distributed.placement.pipeline.cases import SCHEDULES, prove, small_gpt, small_mlp
from tests.proving.test_lockstep import with_settings
from weft.distributed.placement.pipeline import executor as pipeline_executor
from weft.distributed.placement.pipeline.completion import Completion
from weft.distributed.placement.pipeline.placement import Pipeline
from weft.distributed.placement.pipeline.step import MicroBatch
from weft.distributed.placement.pipeline.transport import Transport
from weft.errors import TrainingError
from weft.recipes import cifar10_resnet20, digits_cnn
from weft.specs import Batch
from weft.training.gradients import joint_norm

DEEP = {"model__hidden": "16,16,16", "model__dropout": 0.3, "accumulate": 2, "clip_norm": 0.05}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("degrees", ["pipeline=2", "data=2 pipeline=2"])
def test_stages_train_as_one_rank_does(schedule: str, degrees: str) -> None:
    """With dropout, accumulation, clipping, and a last batch that is ragged."""
    proof = prove(small_mlp(**DEEP), f"{degrees} schedule={schedule}")
    assert proof.passed and proof.largest_error < 2e-6, proof.finding


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tied_weights_and_dropout_of_a_gpt(schedule: str) -> None:
    proof = prove(small_gpt(), f"pipeline=2 schedule={schedule}")
    assert proof.passed, proof.finding


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_in_double_precision_the_tolerance_is_tight(schedule: str) -> None:
    proof = prove(small_gpt(), f"pipeline=2 schedule={schedule}", num_steps=4, dtype=torch.float64)
    assert proof.passed and proof.largest_error < 1e-12, proof.finding


def test_batch_norm_is_of_micro_batches() -> None:
    small = with_settings(
        cifar10_resnet20(), data="digits", model__depth=8, model__width=2, batch_size=18, schedule="constant"
    )
    assert prove(small, "pipeline=3 schedule=1f1b(3)").passed


def test_a_batch_smaller_than_the_micro_batches() -> None:
    small = with_settings(digits_cnn(), model__channels1=2, model__channels2=2, model__hidden=8, batch_size=5)
    assert prove(small, "pipeline=2 schedule=interleaved(8,chunks=2)").passed


# ---- planted faults


def test_gradients_of_tied_weights_that_are_not_added_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Transport, "exchange", lambda self, tensors: {number: [own] for number, (own, _) in tensors.items()}
    )
    assert not prove(small_gpt(), "pipeline=2 schedule=1f1b(4)").passed


def test_a_norm_that_counts_tied_weights_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Pipeline.norm

    def norm(self: Pipeline, norms: dict[str, Tensor]) -> Tensor:
        tied, self._tied = self._tied, {}
        try:
            return real(self, norms)
        finally:
            self._tied = tied

    monkeypatch.setattr(Pipeline, "norm", norm)
    assert not prove(small_gpt(clip_norm=0.01), "pipeline=2").passed


def test_a_norm_over_one_stage_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pipeline, "norm", lambda self, norms: joint_norm(norms))
    assert not prove(small_mlp(clip_norm=0.05), "pipeline=2").passed


def test_a_micro_batch_that_is_dropped_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pipeline_executor.micro_batches

    def all_but_one(batch: Batch, num_micro: int, random: Tensor, **options: bool) -> list[MicroBatch]:
        return real(batch, num_micro, random, **options)[:-1]

    monkeypatch.setattr(pipeline_executor, "micro_batches", all_but_one)
    assert not prove(small_mlp(), "pipeline=2 schedule=1f1b(4)").passed


def test_micro_batches_that_all_weigh_the_same_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """66 samples in 4 micro-batches are 17, 17, 16 and 16."""
    real = pipeline_executor.micro_batches

    def equal(batch: Batch, num_micro: int, random: Tensor, **options: bool) -> list[MicroBatch]:
        micros = real(batch, num_micro, random, **options)
        return [MicroBatch(m.batch, 1 / len(micros), m.random, m.key) for m in micros]

    monkeypatch.setattr(pipeline_executor, "micro_batches", equal)
    assert not prove(small_mlp(), "pipeline=2 schedule=1f1b(4)").passed


def test_dropout_that_draws_the_same_in_every_micro_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_executor, "fold_random_state", lambda state, number, device: state)
    assert not prove(small_mlp(model__dropout=0.3), "pipeline=2 schedule=1f1b(4)").passed


def test_a_gradient_that_is_handed_over_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Completion.begin

    def begin(self: Completion, on_gradient: object) -> None:
        real(self, on_gradient)  # type: ignore[arg-type]
        self._last = 0  # as if the first micro-batch were the last

    monkeypatch.setattr(Completion, "begin", begin)
    assert not prove(small_mlp(), "pipeline=2 schedule=1f1b(4)").passed


# ---- stages that are split themselves


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("degrees", ["pipeline=2 tensor=2", "pipeline=2 tensor=1:2", "pipeline=2 tensor=2:1"])
def test_stages_may_be_split_in_their_own_ways(schedule: str, degrees: str) -> None:
    proof = prove(small_mlp(model__hidden="16,16,16", clip_norm=0.05), f"{degrees} schedule={schedule}")
    assert proof.passed, proof.finding


def test_a_gradient_from_the_wrong_rank_of_a_split_stage_is_a_hang_or_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks, `tensor=1:2`: nobody serves rank 2 if the first stage sends to one rank alone."""
    real = Transport._served_in
    monkeypatch.setattr(Transport, "_served_in", lambda self, stage: real(self, stage)[:1])
    with pytest.raises(TrainingError, match=r"wait for each other|is lost"):
        prove(small_mlp(), "pipeline=2 tensor=1:2 schedule=1f1b(4)")
