"""A whole run from a recipe: record, log, checkpoints, failures, interruption and resume."""

import dataclasses
import math
import os
import signal
from pathlib import Path

import pytest
import torch

from weft.errors import CorruptFileError, DivergedError, RunFolderError, StorageError, UsageError
from weft.recipes import digits_cnn, digits_mlp
from weft.records.record import RunRecord
from weft.records.record_file import read_record
from weft.records.run_folder import RunFolder, create_run_folder
from weft.training.events import Event, Listener, Notice, StepEnded
from weft.training.recipe import Recipe
from weft.training.run import resume_run, run_recipe


def tiny(**settings: object) -> Recipe:
    """Digits in five steps, with dropout's random state in play."""
    recipe = digits_mlp()
    defaults = {
        "epochs": 0.5,
        "batch_size": 128,
        "model.hidden": 16,
        "target": None,
        "evaluate_every": 0.25,
        "schedule": "constant",
    }
    for key, value in {**defaults, **settings}.items():
        recipe = recipe.with_setting(key.replace("__", "."), str(value))
    return dataclasses.replace(recipe, rules=())


def run(recipe: Recipe, path: Path, seeds: tuple[int, ...] = (0,), listeners: tuple[Listener, ...] = ()) -> RunRecord:
    return run_recipe(recipe, folder=create_run_folder(path, recipe.name), seeds=seeds, listeners=listeners)


def test_a_run_leaves_a_whole_record(tmp_path: Path) -> None:
    record = run(tiny(), tmp_path / "run", seeds=(3, 4))
    assert read_record(tmp_path / "run") == record
    first = record.repetitions[0]
    assert (first.seed, first.status, first.stop_reason) == (3, "done", "all samples used")
    assert len(first.series["train/loss"]) == len(first.series["step_time"]) == 5
    assert [e.step for e in first.evaluations] == [3, 5]
    for name in (
        "test/accuracy",
        "validation/loss",
        "wall_clock",
        "throughput",
        "flops_per_sample",
        "share_of_peak",
        "peak_process_memory",
        "peak_tensor_memory",
        "dataset_bias",
        "sampler_order",
    ):
        assert math.isfinite(first.values[name]), name
    assert first.hashes["parameters"] != record.repetitions[1].hashes["parameters"]
    assert first.data_checksum == record.repetitions[1].data_checksum != ""


def test_same_seed_same_bits(tmp_path: Path) -> None:
    one, two = (run(tiny(), tmp_path / name).repetitions[0] for name in "ab")
    assert one.hashes == two.hashes
    assert one.series["train/loss"] == two.series["train/loss"]
    assert [e.values for e in one.evaluations] == [e.values for e in two.evaluations]


def test_the_log_has_every_step(tmp_path: Path) -> None:
    run(tiny(), tmp_path / "run")
    kinds = [line["event"] for line in RunFolder(tmp_path / "run").read_log()]
    assert kinds.count("StepEnded") == 5
    assert kinds[0] == "TrainingStarted" and kinds[-1] == "TrainingEnded"


def test_rules_are_judged_by_the_median_of_repetitions(tmp_path: Path) -> None:
    recipe = dataclasses.replace(tiny(), rules=digits_mlp().rules)
    record = run(recipe, tmp_path / "run", seeds=(0, 1, 2))
    accuracies = sorted(record.values_of("test/accuracy"))
    assert record.verdicts[0].value == accuracies[1]
    assert record.verdicts[0].passed == (accuracies[1] >= 0.97) == record.accepted


def test_target_ends_training_and_is_timed(tmp_path: Path) -> None:
    record = run(tiny(epochs=3, target="accuracy:0.5", model__hidden=64), tmp_path / "run")
    values = record.repetitions[0].values
    assert "target reached" in record.repetitions[0].stop_reason
    assert values["samples_to_target"] == record.repetitions[0].evaluations[-1].samples
    assert 0 < values["time_to_target"] <= values["wall_clock"]


def test_a_target_that_is_missed_counts_as_infinity(tmp_path: Path) -> None:
    record = run(tiny(target="accuracy:0.99"), tmp_path / "run")
    assert record.repetitions[0].values["time_to_target"] == math.inf


class InterruptAfter:
    """Presses Ctrl-C, for real, after the k-th step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepEnded) and event.progress.step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("step", [1, 3, 5])
def test_interrupted_and_resumed_ends_with_the_same_bits(tmp_path: Path, step: int) -> None:
    whole = run(tiny(), tmp_path / "whole").repetitions[0]
    with pytest.raises(KeyboardInterrupt):
        run(tiny(), tmp_path / "cut", listeners=(InterruptAfter(step),))
    assert read_record(tmp_path / "cut").repetitions[0].status == "interrupted"

    resumed = resume_run(RunFolder(tmp_path / "cut")).repetitions[0]
    assert resumed.status == "done"
    assert resumed.hashes == whole.hashes
    assert resumed.series["train/loss"] == whole.series["train/loss"]
    assert [e.values for e in resumed.evaluations] == [e.values for e in whole.evaluations]


def test_resume_goes_on_with_the_seeds_that_are_left(tmp_path: Path) -> None:
    whole = run(tiny(), tmp_path / "whole", seeds=(0, 1))
    with pytest.raises(KeyboardInterrupt):
        run(tiny(), tmp_path / "cut", seeds=(0, 1), listeners=(InterruptAfter(2),))
    resumed = resume_run(RunFolder(tmp_path / "cut"))
    assert [r.hashes for r in resumed.repetitions] == [r.hashes for r in whole.repetitions]


@pytest.mark.parametrize("begins", ["anew", "as told"])
def test_a_checkpoint_that_was_not_there_before_is_no_start(tmp_path: Path, begins: str) -> None:
    """A rank that comes late finds checkpoints of ranks that did not wait for it."""
    whole = run(tiny(), tmp_path / "whole").repetitions[0]
    with pytest.raises(KeyboardInterrupt):
        run(tiny(), tmp_path / "cut", listeners=(InterruptAfter(3),))
    events: list[Event] = []
    if begins == "anew":
        run_recipe(tiny(), folder=RunFolder(tmp_path / "cut"), seeds=(0,), listeners=(events.append,))
    else:
        resume_run(RunFolder(tmp_path / "cut"), begun=(), listeners=(events.append,))
    assert sum(isinstance(event, StepEnded) for event in events) == len(whole.series["train/loss"])


def test_a_damaged_checkpoint_is_passed_over_and_said_so(tmp_path: Path) -> None:
    whole = run(tiny(), tmp_path / "whole").repetitions[0]
    with pytest.raises(KeyboardInterrupt):
        run(tiny(checkpoint_steps=1), tmp_path / "cut", listeners=(InterruptAfter(3),))
    newest = max((tmp_path / "cut/checkpoint/seed-0").iterdir())
    (newest / "rank-00000.safetensors").write_bytes(b"torn")
    notices: list[str] = []
    resumed = resume_run(
        RunFolder(tmp_path / "cut"), listeners=[lambda e: notices.append(e.text) if isinstance(e, Notice) else None]
    )
    assert "damaged" in notices[0] and "step 2" in notices[1]
    assert resumed.repetitions[0].hashes == whole.hashes


def test_no_whole_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tiny(), tmp_path / "cut", listeners=(InterruptAfter(3),))
    for file in (tmp_path / "cut/checkpoint").rglob("index.json"):
        file.write_text("{")
    with pytest.raises(CorruptFileError, match="no checkpoint is whole"):
        resume_run(RunFolder(tmp_path / "cut"))


def test_a_run_that_has_ended_cannot_be_resumed(tmp_path: Path) -> None:
    run(tiny(), tmp_path / "run")
    with pytest.raises(RunFolderError, match="nothing is left to resume"):
        resume_run(RunFolder(tmp_path / "run"))


def test_divergence_names_step_and_tensor_and_counts_as_infinity(tmp_path: Path) -> None:
    recipe = tiny(optimizer="sgd", optimizer__lr=1e38, target="accuracy:0.9")
    with pytest.raises(DivergedError, match=r"step: \d+, .*first bad tensor: (parameter|output of) "):
        run(recipe, tmp_path / "run", seeds=(0, 1))
    record = read_record(tmp_path / "run")
    assert [r.status for r in record.repetitions] == ["failed", "failed"]
    assert record.repetitions[0].values["time_to_target"] == math.inf
    assert "test/accuracy" not in record.repetitions[0].values


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("batch_size", "0", "must be positive"),
        ("epochs", "-1", "must be positive"),
        ("accumulate", "4096", "more micro-batches"),
        ("plan", "pipeline=2 tensor=1:2:4", "every stage"),
        ("model", "mpl", "did you mean 'mlp'"),
        ("model.hiden", "3", "did you mean 'hidden'"),
        ("optimizer.lr", "fast", "wrong type"),
        ("metrics", "acuracy,", "did you mean 'accuracy'"),
        ("metrics", "energy,", "not one that an evaluation computes"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_written(
    tmp_path: Path, key: str, value: str, text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        run_recipe(tiny(**{key: value}), folder=RunFolder(tmp_path / "run"), seeds=(0,))
    assert not (tmp_path / "run").exists()


def test_a_batch_larger_than_the_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="batch"):
        run(tiny(batch_size=100000), tmp_path / "run")
    assert not (tmp_path / "run").exists(), "a run that never began leaves nothing in the way of the next"


def test_a_full_disk_ends_training_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    recipe = tiny(checkpoint_steps=2)
    folder = create_run_folder(tmp_path / "run", "run")
    monkeypatch.setattr("weft.training.checkpoint.writing.save_file", full)
    with pytest.raises(StorageError, match="No space left"):
        run_recipe(recipe, folder=folder, seeds=(0,))
    assert read_record(tmp_path / "run").repetitions[0].status == "running"
    assert not list((tmp_path / "run").rglob("*.tmp"))


def test_every_executor_trains(tmp_path: Path) -> None:
    eager, reference = (
        run(tiny(executor=name), tmp_path / name).repetitions[0].series["train/loss"] for name in ("eager", "reference")
    )
    assert eager == pytest.approx(reference, rel=1e-4)
    assert eager != reference


def test_batch_norm_and_clipping_and_accumulation_resume_too(tmp_path: Path) -> None:
    recipe = digits_cnn()
    for key, value in {
        "epochs": 0.3,
        "batch_size": 128,
        "accumulate": 2,
        "clip_norm": 0.5,
        "target": None,
        "schedule": "constant",
    }.items():
        recipe = recipe.with_setting(key, str(value))
    whole = run(recipe, tmp_path / "whole").repetitions[0]
    with pytest.raises(KeyboardInterrupt):
        run(recipe, tmp_path / "cut", listeners=(InterruptAfter(2),))
    assert resume_run(RunFolder(tmp_path / "cut")).repetitions[0].hashes == whole.hashes


def test_determinism_is_switched_back(tmp_path: Path) -> None:
    run(tiny(), tmp_path / "run")
    assert not torch.are_deterministic_algorithms_enabled()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_autocast_computes_in_another_type_and_keeps_float32_parameters(tmp_path: Path) -> None:
    plain, cast = (
        run(tiny(**settings), tmp_path / name).repetitions[0].series["train/loss"]
        for name, settings in {"plain": {}, "cast": {"executor__autocast": "bfloat16"}}.items()
    )
    assert cast != plain
    assert cast == pytest.approx(plain, rel=0.05)
    with pytest.raises(UsageError, match=r"executor\.autocast: 'int8'"):
        run(tiny(executor__autocast="int8"), tmp_path / "int8")
