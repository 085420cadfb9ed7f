"""Pipelines in virtual time: every action takes its share of a pass, so that the bubble shows."""

from pathlib import Path

import pytest

from tests.simulation.test_simulation import run, step_time, tiny
from weft.planning.cluster import Link
from weft.planning.network import NetworkModel
from weft.simulation.computation import ComputeModel

FAST = NetworkModel(Link(alpha=1e-9, beta=0.0))
HIDDEN = ",".join(["64"] * 15)  # with the first and the last, 16 layers of about the same size


@pytest.mark.parametrize(
    ("schedule", "ideal"),
    [("gpipe(8)", 8 / 15), ("1f1b(8)", 8 / 15), ("zero_bubble(8)", 24 / 31), ("interleaved(8,chunks=2)", 16 / 23)],
)
def test_the_bubble_of_eight_stages_shows(tmp_path: Path, schedule: str, ideal: float) -> None:
    """One rank takes 1 s; 8 stages 1/8 s and the bubble. Layers are not quite equal, and the update costs nothing."""
    found = run(
        tmp_path / "run", tiny(f"pipeline=8 schedule={schedule}", model__hidden=HIDDEN), network=FAST, compute=1.0
    )
    assert step_time(found) == pytest.approx(1 / 8 / ideal, rel=0.15)
    values = found.record.repetitions[0].values
    assert 0 < values["bubble_share"] <= values["idle_share"] < 1 - 0.8 * ideal


def test_layers_take_the_time_that_their_gradients_take() -> None:
    model = ComputeModel(1.0, 0.0, 0.0, {"last": 0.5, "middle": 0.75, "first": 1.0})
    assert model.share_of(["last"]) + model.share_of(["middle", "first"]) == pytest.approx(1.0)
    assert model.share_of(["middle"]) == pytest.approx(0.25 / (2 / 3))
    assert model.seconds_of("forward", 1) + model.seconds_of("backward", 1) == pytest.approx(1.0)
    halves = model.seconds_of("backward_input", 1) + model.seconds_of("backward_weight", 1)
    assert halves == pytest.approx(model.seconds_of("backward", 1))
