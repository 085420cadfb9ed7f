"""Quality of predictions, summed over batches."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.errors import UsageError
from weft.metrics.metric import METRICS
from weft.metrics.quality import (
    QUALITY,
    Tally,
    accuracy,
    difference_heatmap,
    l1_error,
    l2_error,
    max_error,
    mean_loss,
    variance_heatmap,
)
from weft.specs import IGNORED

INF, NAN = math.inf, math.nan


def test_accuracy_counts_right_rows() -> None:
    scores = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.4, 0.5, 0.1]])
    assert accuracy(scores, torch.tensor([1, 0, 2, 0])) == Tally("mean", 3.0, 4)
    assert accuracy(scores, torch.tensor([1, 0, 2, 0]), k=2).value == 1.0
    assert accuracy(scores, torch.tensor([0, 2, 0, 2]), k=2).value == 0.0


def test_accuracy_of_sequences_counts_every_position() -> None:
    # Deep500 knew one label a sample; a character model has one for each position.
    targets = torch.randint(7, (3, 5), dtype=torch.int32)
    scores = torch.nn.functional.one_hot(targets.long(), 7).float()
    scores[0, 0] = scores[0, 0].roll(1)
    tally = accuracy(scores, targets)
    assert (tally.count, tally.value) == (15, 14 / 15)


def test_accuracy_with_fewer_classes_than_k() -> None:
    assert accuracy(torch.zeros(4, 3), torch.tensor([0, 1, 2, 2]), k=5).value == 1.0


def test_scores_that_are_not_numbers_are_wrong() -> None:
    scores = torch.tensor([[NAN, 0.0], [NAN, NAN], [1.0, 0.0]])
    assert accuracy(scores, torch.tensor([0, 0, 0])).value == pytest.approx(1 / 3)
    assert accuracy(scores, torch.tensor([0, 0, 0]), k=2).value == pytest.approx(1 / 3)


@pytest.mark.parametrize("targets", [torch.zeros(4, 1, dtype=torch.int64), torch.zeros(4), torch.tensor([0, 1])])
def test_targets_that_are_no_class_indices_are_refused(targets: Tensor) -> None:
    with pytest.raises(UsageError, match="one class index for each row"):
        accuracy(torch.zeros(4, 3), targets)


def test_errors_of_known_differences() -> None:
    predictions, targets = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 5.0], [3.0, 0.0]])
    assert l1_error(predictions, targets).value == 7 / 4
    assert l2_error(predictions, targets).value == 2.5
    assert max_error(predictions, targets).value == 4.0


def test_l2_error_is_the_norm_over_the_root_of_the_size() -> None:
    a, b = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    assert l2_error(a, b).value == pytest.approx(float((a - b).norm()) / math.sqrt(60))


@pytest.mark.parametrize("error", [l1_error, l2_error, max_error, difference_heatmap])
def test_shapes_are_never_broadcast(error: object) -> None:
    # [n, 1] against [n] would compare every prediction with every target.
    with pytest.raises(UsageError, match="differ in shape"):
        error(torch.zeros(4, 1), torch.zeros(4))  # type: ignore[operator]


def test_half_precision_neither_overflows_nor_rounds() -> None:
    big = torch.full((1000,), 60_000.0, dtype=torch.float16)
    assert l1_error(big, -big).value == 120_000.0
    assert l2_error(big, -big).value == 120_000.0


@given(st.lists(st.integers(1, 7), min_size=1, max_size=5), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_any_cut_into_batches_gives_the_same_value(sizes: list[int], seed: int) -> None:
    # Deep500's average divided by n + 1; a plain mean over batches lets a short last batch weigh too much.
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(sum(sizes), 6, generator=generator)
    classes = torch.randint(6, (sum(sizes),), generator=generator)
    values = torch.randn(sum(sizes), 6, generator=generator)
    for name, metric in QUALITY.items():
        targets = values if name.endswith("error") else classes
        losses = scores.mean(1)
        whole = metric(scores, targets, losses.mean(), sum(sizes))
        pieces = zip(scores.split(sizes), targets.split(sizes), losses.split(sizes), sizes, strict=True)
        parts = sum((metric(s, (t,), loss.mean(), size) for s, t, loss, size in pieces), Tally())
        assert parts.count == whole.count
        assert parts.value == pytest.approx(whole.value, abs=1e-6)


def test_loss_weighs_by_samples() -> None:
    assert (mean_loss(torch.tensor(1.0), 3) + mean_loss(5.0, 1)).value == 2.0


def test_first_batch_counts_in_full() -> None:
    assert (Tally() + mean_loss(4.0, 1)).value == 4.0


def test_empty_tally_is_neutral_and_has_no_value() -> None:
    tally = Tally("maximum", 3.0, 2)
    assert Tally() + tally == tally + Tally() == tally
    assert math.isnan(Tally().value)
    assert math.isnan(max_error(torch.zeros(0), torch.zeros(0)).value)


def test_adding_leaves_the_parts_alone() -> None:
    one, other = mean_loss(1.0, 1), mean_loss(2.0, 1)
    assert (one + other).value == 1.5
    assert (one.value, other.value) == (1.0, 2.0)


def test_tallies_of_two_metrics_do_not_add() -> None:
    with pytest.raises(AssertionError, match="two metrics"):
        mean_loss(1.0, 1) + Tally("maximum", 1.0, 1)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_maximum_keeps_what_is_not_a_number(order: tuple[int, int]) -> None:
    tallies = [max_error(torch.tensor([NAN]), torch.tensor([0.0])), max_error(torch.tensor([1.0]), torch.tensor([0.0]))]
    assert math.isnan((tallies[order[0]] + tallies[order[1]]).value)


def test_catalogue_holds_metrics_of_known_names() -> None:
    assert set(QUALITY) <= set(METRICS)


def test_catalogue_takes_the_first_of_several_targets() -> None:
    scores, targets = torch.tensor([[0.0, 1.0]]), torch.tensor([1])
    assert QUALITY["accuracy"](scores, (targets, torch.tensor([0])), 0.5, 1).value == 1.0
    assert QUALITY["accuracy"](scores, targets, 0.5, 1).value == 1.0
    assert QUALITY["loss"](scores, targets, torch.tensor(0.5), 1).value == 0.5


def test_difference_heatmap_shows_where_and_which_way() -> None:
    a = torch.tensor([0.0, 3.0, 1.0, 0.0, -1.0, 1.0])
    b = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    assert difference_heatmap(a, b).tolist() == [0.0, 1.0, 2.0, -2.0, -2.0, 0.0]


def test_difference_heatmap_at_the_edges() -> None:
    a = torch.tensor([INF, INF, 1.0, NAN, 1e-45], dtype=torch.float32)
    b = torch.tensor([INF, -INF, INF, 1.0, 0.0], dtype=torch.float32)
    heat = difference_heatmap(a, b)
    assert heat[:3].tolist() == [0.0, 2.0, -2.0]
    assert heat[3].isnan()
    assert heat[4] == 2.0  # no epsilon hides a small difference


def test_variance_is_not_always_zero() -> None:
    # Deep500's VarHeatmap dropped the result of np.concatenate: it called every operator reproducible.
    outputs = [torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]), torch.tensor([1.0, 9.0])]
    assert variance_heatmap(outputs).tolist() == [0.0, 13.0]


@given(st.floats(-1e30, 1e30), st.integers(2, 9))
@settings(max_examples=40, deadline=None)
def test_variance_of_equal_outputs_is_exactly_zero(value: float, count: int) -> None:
    assert variance_heatmap([torch.tensor([value], dtype=torch.float64)] * count).item() == 0.0


def test_variance_sees_the_last_bit() -> None:
    one = torch.tensor([1.0])
    other = torch.nextafter(one, torch.tensor([2.0]))
    assert variance_heatmap([one, one, other]).item() > 0


@pytest.mark.parametrize("outputs", [[], [torch.zeros(2)], [torch.zeros(2), torch.zeros(3)]])
def test_variance_needs_two_outputs_of_one_shape(outputs: list[Tensor]) -> None:
    with pytest.raises(UsageError, match="two or more outputs"):
        variance_heatmap(outputs)


def test_padding_does_not_count() -> None:
    scores = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.9, 0.1]])
    assert accuracy(scores, torch.tensor([0, IGNORED, 1])) == Tally("mean", 1.0, 2)
