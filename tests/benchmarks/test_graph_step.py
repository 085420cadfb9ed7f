"""The harness of the graph-step benchmark: what it computes from times, and that its workers answer."""

import itertools
from pathlib import Path

import pytest

from benchmarks.graph_step import RATIOS, mean_row, row_of
from benchmarks.graph_steps.cases import CASES, loss_of
from benchmarks.graph_steps.overhead import measure_overhead
from benchmarks.graph_steps.systems import SYSTEMS
from benchmarks.graph_steps.workers import Worker, WorkerError

DRIFT = [1.0, 2.0, 1.5, 3.0, 1.0, 2.5]


def times(**factors: float) -> dict[str, list[float]]:
    named = {name: factors.get(name.split(",")[0].replace("torch.", ""), 1.0) for name in SYSTEMS}
    return {name: [factor * x for x in DRIFT] for name, factor in named.items()}


def test_ratios_are_medians_over_rounds() -> None:
    row = row_of("gpt", times(eager=1.5, graph=1.0), {"graph": ["0x1"], "eager": ["0x1"]})
    assert (row["graph_to_eager"], row["interval_of_graph_to_eager"]) == (1.5, [1.5, 1.5])
    assert (row["bits_of_eager"], row["eager_ms"]) == ("yes", 1500 * 1.75)
    assert row_of("gpt", times(), {"graph": ["0x1"], "eager": ["0x2"]})["bits_of_eager"] == "no"


def test_means_are_geometric_over_cases() -> None:
    rows = [row_of("a", times(eager=4.0), {}), row_of("b", times(eager=1.0), {})]
    row = mean_row(rows)
    assert row["graph_to_eager"] == pytest.approx(2.0)
    assert row["interval_of_graph_to_eager"] == pytest.approx([2.0, 2.0])
    assert row["inductor_to_jax"] == 1.0


def test_a_peer_that_is_missing_leaves_its_ratios_out() -> None:
    values = {name: rounds for name, rounds in times().items() if name != "jax"}
    row = row_of("a", values, {})
    assert "inductor_to_jax" not in row and "inductor_to_jax" not in mean_row([row])
    assert RATIOS.keys() - {"inductor_to_jax"} <= row.keys()


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("batch 4")])
def test_a_case_gives_a_loss(name: str) -> None:
    x, y = next(CASES[name].batches())
    assert loss_of(CASES[name].make_model()(x), y).isfinite()


def test_the_overhead_is_the_difference() -> None:
    found = measure_overhead()
    assert found["overhead"] == found["generated"] - found["in a loop in C++"]


@pytest.mark.slow
def test_a_worker_answers_and_says_why_it_cannot(tmp_path: Path) -> None:
    worker = Worker("eager", 1, tmp_path)
    try:
        worker.begin_to_load("mlp, batch 4")
        assert len(worker.losses()) == 10
        assert worker.run("mlp, batch 4", 1) > 0
        worker.forget()
        with pytest.raises(WorkerError, match="KeyError"):
            worker.run("mlp, batch 4", 1)
    finally:
        worker.close()


def test_systems_train_alike() -> None:
    def losses(system: str) -> list[float]:
        return list(itertools.islice(SYSTEMS[system](CASES["lstm, batch 4"]), 3))

    assert losses("graph") == losses("eager")
