"""Causes found in traces: weights fitted to gradients, and batches that were not shared."""

from dataclasses import asdict

import pytest
import torch
from torch import Tensor

from weft.distributed.script.observation.tracing import Counted, Facts, counts_of
from weft.proving.script_causes import (
    are_weights,
    draws_equally,
    find_counts,
    find_unshared,
    fit_weights,
    is_mean,
    is_sum,
    tokens,
)
from weft.proving.script_trace import ScriptTrace


def gradients(num_ranks: int) -> list[dict[str, Tensor]]:
    own = torch.Generator().manual_seed(2)
    return [{"w": torch.randn(5, 4, generator=own), "b": torch.randn(4, generator=own)} for _ in range(num_ranks)]


def whole_of(found: list[dict[str, Tensor]], weights: list[float]) -> dict[str, Tensor]:
    return {
        name: sum((weight * g[name] for weight, g in zip(weights, found, strict=True)), torch.zeros(()))
        for name in ("w", "b")
    }


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.2, 0.3, 0.5], [0.5, 0.5, 0.5]])
def test_weights_are_found(weights: list[float]) -> None:
    found = gradients(3)
    fitted, left = fit_weights(found, whole_of(found, weights))
    assert fitted == pytest.approx(weights, abs=1e-5) and left < 1e-5
    assert (is_sum(fitted, left), is_mean(fitted, left)) == (weights[0] == 1.0, sum(weights) == 1.0)


def test_a_gradient_that_is_no_sum_of_the_ranks_fits_nothing() -> None:
    found = gradients(3)
    weights, left = fit_weights(found[:2], found[2])
    assert left > 0.5 and not is_sum(weights, left) and not is_mean(weights, left)


def trace(*, inputs: str = "", rows: int = 4, **facts: object) -> ScriptTrace:
    seen = Facts(inputs=[inputs], rows=[rows], **{"num_batches": 1, **facts})  # type: ignore[arg-type]
    return ScriptTrace([{}, {}], {}, seen)


def test_the_same_batch_on_every_rank_is_found() -> None:
    cause = find_unshared([trace(inputs="a", rows=8), trace(inputs="a", rows=8)], trace(inputs="a", rows=8))
    assert cause is not None and "same batch" in cause.fact


def test_shares_of_a_batch_are_no_fault() -> None:
    assert find_unshared([trace(inputs="a"), trace(inputs="b")], trace(inputs="c", rows=8)) is None
    one_sample = [trace(inputs="a", rows=1)] * 2  # the second rank has it for a stand-in
    assert find_unshared(one_sample, trace(inputs="a", rows=1)) is None


def test_batches_of_ones_own_are_found() -> None:
    ranks = [trace(inputs=name, rows=8, num_batches=0) for name in "ab"]
    cause = find_unshared(ranks, trace(inputs="c", rows=8))
    assert cause is not None and "rows of the ranks: 16, of one process: 8" in cause.fact


def test_equal_draws_are_those_of_models() -> None:
    def drawn(state: str, draws: bool) -> ScriptTrace:
        return trace(random_states=[state], model_draws=[draws])

    assert draws_equally([drawn("a", True), drawn("a", True)])
    assert not draws_equally([drawn("a", True), drawn("b", True)])
    assert not draws_equally([drawn("a", False), drawn("a", False)])


def test_the_count_that_explains_the_weights_is_named() -> None:
    batches = [torch.tensor([[1, 2, -100], [3, -100, -100]]), torch.tensor([[4, 5, 6], [7, 8, 9]])]
    counts = [[(asdict(way), n) for way, n in counts_of((torch.zeros(2), batch)).items()] for batch in batches]
    ranks = [trace(rows=2, counts=own) for own in counts]
    assert find_counts(ranks, [3 / 9, 6 / 9]) == Counted(1, padding=-100)
    assert find_counts(ranks, [1 / 5, 4 / 5]) == Counted(1, padding=-100, is_shifted=True)
    assert find_counts(ranks, [0.9, 0.1]) is None
    ranks = [trace(weight=0.5), trace(weight=0.5)]
    assert are_weights(ranks, [0.5, 0.5]) and not are_weights(ranks, [3 / 9, 6 / 9])
    assert "not -100" in str(tokens(Counted(1, padding=-100), [3 / 9, 6 / 9]))
