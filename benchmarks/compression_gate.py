"""The convergence gate of gradient compression: every scheme against dense gradients, over five seeds.

    python -m benchmarks.compression_gate                      train what the result file does not hold yet
    python -m benchmarks.compression_gate --only topk,digits   words that are all in a recipe's or a scheme's name
    python -m benchmarks.compression_gate --list               print the commands, and train nothing
    scripts/make-compression-table                             write the tables of docs/compression.md

Four virtual ranks in one process: the code and the mathematics of real ones. Runs of one seed begin with the same
weights and take the same batches. A scheme passes when its test accuracy is shown to be less than one hundredth below
that of dense gradients (`judge_quality`) that were trained with the same settings: those of the recipe but for what
stands in `SETTINGS`, and in `PATIENT` for schemes that keep most of a gradient waiting. A result counts as long as its
command is the one that stands here.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from weft.atomic import write_json
from weft.errors import DivergedError, EncodingError
from weft.metrics.convergence import Quality, judge_quality
from weft.records.machine import describe_machine, describe_source, describe_versions
from weft.records.run_folder import create_run_folder
from weft.records.strict_json import encode_json
from weft.runs.job import choose_recipe
from weft.simulation.simulation import simulate
from weft.training.process import use_threads

__all__ = ["DENSE", "MARGIN", "RESULT", "TRAININGS", "Training", "main", "read_results", "train", "verdict_of"]

RESULT = Path(__file__).parent / "results" / "compression_gate.json"
SEEDS = (0, 1, 2, 3, 4)
MARGIN = 0.01
"""Of the test accuracy: seeds of dense runs of `digits_cnn` differ by as much."""
STEP_SECONDS = 0.01
"""That a virtual step computes; no result hangs on it."""

DENSE = "none"
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "digits_cnn": ("target=none", "epochs=10", "evaluate_every=10"),
    "fashion_cnn": (
        "target=none",
        "optimizer=momentum",
        "optimizer.lr=0.02",
        "schedule.warmup_epochs=0.05",
        "data.limit=12000",
        "batch_size=32",
        "epochs=2",
        "evaluate_every=2",
    ),
    "pydoc_lstm": ("optimizer=momentum", "optimizer.lr=1.5", "epochs=2"),
}
"""Of dense and compressed runs alike. Trainings are cut short, so that a gate of many runs ends; DGC keeps the momentum
of its gradients, so all have an optimizer with momentum."""

EVERYWHERE = ("qsgd(4)", "topk(0.01)", "powersgd(4)", "dgc(0.01)")
"""A quantised scheme, a sparse one, one of low rank, and DGC."""
CLIPPED = (*EVERYWHERE[:-1], "dgc(0.01,clip=1)")
"""Where dense gradients are clipped by their norm: DGC clips those of a rank instead, before it adds them up."""
SCHEMES: Mapping[str, tuple[str, ...]] = {
    "digits_cnn": (
        "fp16",
        "bf16",
        "bf16(round=stochastic)",
        "qsgd(8)",
        "qsgd(4)",
        "qsgd(2)",
        "terngrad",
        "onebit",
        "sign",
        "topk(0.01)",
        "topk(0.01,select=sampled)",
        "threshold",
        "randomk(0.25)",
        "dgc(0.01)",
        "dgc(0.001)",
        "powersgd(4)",
        "factors",
    ),
    "fashion_cnn": EVERYWHERE,
    "pydoc_lstm": CLIPPED,
}
PATIENT: Mapping[str, tuple[str, ...]] = {
    "digits_cnn": ("optimizer.lr=0.02", "epochs=60", "evaluate_every=60"),
    "fashion_cnn": ("epochs=12", "evaluate_every=12"),
    "pydoc_lstm": ("epochs=20",),
}
"""Instead, for those of `KEEPING`. What waits comes late: it bears a smaller learning rate, and needs more steps."""
KEEPING: Mapping[str, frozenset[str]] = {
    "digits_cnn": frozenset(
        {"onebit", "sign", "topk(0.01,select=sampled)", "randomk(0.25)", "dgc(0.01)", "dgc(0.001)"}
    ),
    "fashion_cnn": frozenset({"topk(0.01)", "dgc(0.01)"}),
    "pydoc_lstm": frozenset({"topk(0.01)", "powersgd(4)", "dgc(0.01,clip=1)"}),
}
OWN_SETTINGS: Mapping[tuple[str, str], tuple[str, ...]] = {("pydoc_lstm", "dgc(0.01,clip=1)"): ("clip_norm=none",)}
"""Of a scheme alone: DGC clips by itself."""

Row = dict[str, Any]
Key = tuple[str, str, bool]


@dataclass(frozen=True)
class Training:
    """One line of a table: a recipe and a scheme, with the settings of `SETTINGS` alone or of `PATIENT` too."""

    recipe: str
    scheme: str
    is_patient: bool = False

    @property
    def key(self) -> Key:
        return self.recipe, self.scheme, self.is_patient

    @property
    def plan(self) -> str:
        return "data=4" if self.scheme == DENSE else f"data=4 compress={self.scheme}"

    @property
    def settings(self) -> tuple[str, ...]:
        patient = PATIENT[self.recipe] if self.is_patient else ()
        settings = SETTINGS[self.recipe] + patient + OWN_SETTINGS.get((self.recipe, self.scheme), ())
        last = {setting.partition("=")[0]: setting for setting in settings}
        return tuple(last.values())

    @property
    def command(self) -> str:
        changes = "".join(f" --set {setting}" for setting in self.settings)
        return f'weft simulate {self.recipe} --plan "{self.plan}"{changes} --repeat {len(SEEDS)}'


def trainings_of(recipe: str, *, is_patient: bool) -> tuple[Training, ...]:
    """The lines of a table, dense gradients first; none where no scheme is trained so."""
    keeping = KEEPING.get(recipe, frozenset())
    schemes = [scheme for scheme in SCHEMES[recipe] if (scheme in keeping) == is_patient]
    return tuple(Training(recipe, scheme, is_patient) for scheme in (DENSE, *schemes) if schemes)


TRAININGS = tuple(
    t for recipe in SCHEMES for is_patient in (False, True) for t in trainings_of(recipe, is_patient=is_patient)
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="words that are all in a recipe's or scheme's name, with commas")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args(arguments)
    words = [word for word in given.only.split(",") if word]
    chosen = [t for t in TRAININGS if all(word in f"{t.recipe} {t.scheme}" for word in words)]
    if given.list:
        print("\n".join(training.command for training in chosen))
        return
    results = read_results(given.out)
    train_all([t for t in chosen if t.key not in results], given.out, given.processes)


def train_all(trainings: Iterable[Training], out: Path, processes: int = 2) -> None:
    """Train, seeds side by side, and write every training as soon as its last seed is there."""
    with ProcessPoolExecutor(processes) as pool:
        jobs = {pool.submit(train, training, seed): (training, seed) for training in trainings for seed in SEEDS}
        found: dict[Key, dict[int, Row]] = {}
        for job in as_completed(jobs):
            training, seed = jobs[job]
            found.setdefault(training.key, {})[seed] = job.result()
            if len(found[training.key]) == len(SEEDS):
                row = _joined(training, [found[training.key][seed] for seed in SEEDS])
                write_results(out, {**read_results(out), training.key: row})
                print(f"{training.command}\n    {row['raw_test_accuracy']}", flush=True)


def train(training: Training, seed: int, settings: Sequence[str] = ()) -> Row:
    """One seed: its scores and what a rank sent. A scheme that diverges has an accuracy of zero."""
    recipe = choose_recipe(training.recipe, [*training.settings, *settings], training.plan, None)
    began = time.process_time()
    with tempfile.TemporaryDirectory() as scratch, use_threads(1):
        folder = create_run_folder(Path(scratch) / "run", training.recipe)
        try:
            run = simulate(recipe, folder=folder, seeds=(seed,), compute=STEP_SECONDS)
        except (DivergedError, EncodingError) as error:
            if training.scheme == DENSE:  # nothing could be worse than that
                raise
            return {"test_accuracy": 0.0, "error": str(error)}
    values = run.record.repetitions[0].values
    row = {key.replace("/", "_"): values[key] for key in ("test/accuracy", "test/loss", "bytes_per_step")}
    return {**row, "processor_seconds": round(time.process_time() - began, 1)}


def verdict_of(results: Mapping[Key, Row], key: Key) -> Quality:
    """Of a scheme, against dense gradients with the same settings."""
    recipe, _, is_patient = key
    values, reference = (results[which]["raw_test_accuracy"] for which in (key, (recipe, DENSE, is_patient)))
    return judge_quality(values, reference, margin=MARGIN)


def _joined(training: Training, seeds: Sequence[Row]) -> Row:
    columns = {f"raw_{key}": [row.get(key) for row in seeds] for key in seeds[0]}
    about = {"recipe": training.recipe, "scheme": training.scheme, "command": training.command}
    return {**about, "source": describe_source(), **columns}


def read_results(path: Path) -> dict[Key, Row]:
    """By training; those of other commands are left out."""
    if not path.exists():
        return {}
    rows = {row["command"]: row for row in json.loads(path.read_text(encoding="utf-8"))["trainings"]}
    return {t.key: rows[t.command] for t in TRAININGS if t.command in rows}


def write_results(path: Path, results: Mapping[Key, Row]) -> None:
    about: Row = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": describe_machine()}
    about |= {"versions": describe_versions(), "source": describe_source(), "margin": MARGIN, "seeds": list(SEEDS)}
    write_json(path, encode_json({**about, "trainings": [results[t.key] for t in TRAININGS if t.key in results]}))


if __name__ == "__main__":
    main()
