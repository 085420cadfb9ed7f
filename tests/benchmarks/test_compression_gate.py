"""The convergence gate of compression: its rule, with a fault that it finds; its commands, results and table."""

import json
from pathlib import Path
from statistics import median

import pytest
import torch

from benchmarks import compression_gate as gate
from benchmarks.compression_gate import DENSE, MARGIN, TRAININGS, Training
from tests.docs.commands import find_fault
from tests.docs.documents import ROOT
from weft.distributed.codecs.packing import Bucket
from weft.distributed.codecs.residuals import Residuals, working_type
from weft.errors import DivergedError, RecipeError
from weft.metrics.convergence import judge_quality
from weft.runs.job import choose_recipe
from weft.training.build import check_recipe

SHORT = ("epochs=3", "evaluate_every=3", "schedule.warmup_epochs=0.5")


def scores(scheme: str, seeds: tuple[int, ...], settings: tuple[str, ...]) -> list[float]:
    return [gate.train(Training("digits_cnn", scheme), seed, settings)["test_accuracy"] for seed in seeds]


@pytest.mark.slow
def test_two_schemes_learn_what_dense_gradients_learn() -> None:
    (dense,), (quantised,), (factored,) = (scores(scheme, (0,), SHORT) for scheme in (DENSE, "qsgd(4)", "powersgd(4)"))
    assert dense > 0.85 and min(quantised, factored) > dense - 0.03


def forget(self: Residuals, bucket: Bucket, device: torch.device) -> torch.Tensor:
    return torch.zeros(bucket.num_elements, dtype=working_type(bucket.dtype), device=device)


@pytest.mark.slow
def test_a_residual_that_is_dropped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same scheme with its residual: after so few steps dense gradients are ahead of both."""
    seeds = (0, 1, 2, 3, 4)
    whole = scores("topk(0.01)", seeds, SHORT)
    monkeypatch.setattr(Residuals, "beside", forget)
    assert not judge_quality(scores("topk(0.01)", seeds, SHORT), whole, margin=MARGIN).passed
    assert median(whole) > 0.5, "the scheme itself learns"


def test_every_command_is_one_that_weft_understands() -> None:
    assert len({training.command for training in TRAININGS}) == len(TRAININGS)
    for training in TRAININGS:
        assert find_fault(training.command, ROOT) == ""
        check_recipe(choose_recipe(training.recipe, training.settings, training.plan, None))


def row(training: Training, accuracy: float) -> gate.Row:
    spread = [accuracy + 0.001 * seed for seed in range(5)]
    about = {"recipe": training.recipe, "scheme": training.scheme, "command": training.command}
    return {**about, "raw_test_accuracy": spread, "raw_bytes_per_step": [1e3] * 5}


def test_results_of_other_commands_do_not_count(tmp_path: Path) -> None:
    first, second = TRAININGS[:2]
    out = tmp_path / "gate.json"
    gate.write_results(out, {first.key: row(first, 0.9), second.key: {**row(second, 0.9), "command": "weft run"}})
    assert list(gate.read_results(out)) == [first.key]
    assert json.loads(out.read_text())["margin"] == MARGIN


@pytest.mark.parametrize(("accuracy", "passes"), [(0.9, True), (0.899, True), (0.88, False)])
def test_a_scheme_is_held_to_dense_gradients_of_its_recipe(accuracy: float, passes: bool) -> None:
    dense, scheme = Training("digits_cnn", DENSE), Training("digits_cnn", "qsgd(4)")
    results = {dense.key: row(dense, 0.9), scheme.key: row(scheme, accuracy)}
    assert gate.verdict_of(results, scheme.key).passed == passes


def test_a_scheme_that_trains_longer_is_held_to_dense_gradients_that_do() -> None:
    short, dense = Training("digits_cnn", DENSE), Training("digits_cnn", DENSE, is_patient=True)
    scheme = Training("digits_cnn", "onebit", is_patient=True)
    assert {short, dense, scheme} <= set(TRAININGS) and scheme.settings == dense.settings != short.settings
    results = {short.key: row(short, 0.9), dense.key: row(dense, 0.95), scheme.key: row(scheme, 0.93)}
    assert not gate.verdict_of(results, scheme.key).passed


@pytest.mark.slow
def test_a_scheme_that_diverges_has_learnt_nothing_and_dense_gradients_must_not() -> None:
    # Regression: settings that a recipe does not have made every run fail, dense ones too, and all schemes passed.
    wild = ("optimizer.lr=1e30", "epochs=1", "schedule.warmup_epochs=0.1")
    found = gate.train(Training("digits_cnn", "bf16"), 0, wild)
    assert found["test_accuracy"] == 0.0 and found["error"]
    with pytest.raises(DivergedError):
        gate.train(Training("digits_cnn", DENSE), 0, wild)
    with pytest.raises(RecipeError):
        gate.train(Training("digits_cnn", "bf16"), 0, ("data.limit=64",))
