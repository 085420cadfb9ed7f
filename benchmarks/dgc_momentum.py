"""The difference that momentum correction and momentum factor masking make to sparse gradients.

    python -m benchmarks.dgc_momentum [--seeds 5] [--epochs 10] [--out benchmarks/results/dgc_momentum.json]

`digits_mlp` on 4 virtual ranks, stochastic gradient descent with a momentum of 0.9, one number in a hundred sent:

dense           compress=none
dgc             velocities are accumulated, and become 0 where they were sent (Lin et al., 2018)
dgc, unmasked   the same, but velocities go on where they were sent: a planted fault
topk            gradients are accumulated, and the optimizer has its momentum after the sum

Warm-up is left out, as top-k has none. Losses and accuracies are those of the test set after the last epoch, medians
over the seeds with their intervals, for each learning rate.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from weft.atomic import write_json
from weft.distributed.channels.all_reduce import replicas_in
from weft.distributed.codecs import kernels
from weft.distributed.group import AbstractGroup
from weft.distributed.placement import MeshGroups
from weft.distributed.virtual import run_virtual
from weft.metrics.statistics import summarise
from weft.recipes import find_recipe
from weft.records.machine import describe_machine, describe_source, describe_versions
from weft.records.strict_json import encode_json
from weft.runs.job import with_plan, with_settings
from weft.torch_private import use_determinism
from weft.training.build import build_splits, build_task
from weft.training.evaluation import evaluate
from weft.training.loop import take_step
from weft.training.recipe import Recipe

__all__ = ["CASES", "main", "recipe_for", "train"]

RESULT = Path(__file__).parent / "results" / "dgc_momentum.json"
NUM_RANKS = 4
CONFIDENCE = 0.9
"""Of intervals; those of 5 seeds, from the least to the largest, have 93.75%."""
UNMASKED = "dgc, unmasked"
SETTINGS = ("optimizer=momentum", "schedule=constant", "batch_size=64")
LEARNING_RATES = (0.03, 0.1, 0.3)
CASES = {
    "dense": "none",
    "dgc": "dgc(0.01,warmup=0)",
    UNMASKED: "dgc(0.01,warmup=0)",
    "topk": "topk(0.01)",
}
"""By name, the compression."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    about: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": describe_machine()}
    about |= {"versions": describe_versions(), "source": describe_source()}
    rows = [measure(name, lr, options.seeds, options.epochs) for lr in LEARNING_RATES for name in CASES]
    write_json(options.out, encode_json({**about, "epochs": options.epochs, "rows": rows}))


def measure(name: str, lr: float, num_seeds: int, epochs: int) -> dict[str, Any]:
    """Loss and accuracy of one case over the seeds."""
    recipe = recipe_for(name, lr)
    found = [train(name, recipe, seed, epochs) for seed in range(num_seeds)]
    row: dict[str, Any] = {"case": name, "learning_rate": lr, "compress": str(recipe.mutable.plan.compress)}
    for metric in ("loss", "accuracy"):
        values = [values[metric] for values in found]
        summary = summarise(values, CONFIDENCE)
        row[f"{metric} (interval of {CONFIDENCE:.0%} or more)"] = summary.median
        row[f"interval_of_{metric}"] = [summary.interval.low, summary.interval.high]
        row[f"raw_{metric}"] = values
        print(f"lr {lr:<6}{name:16}{metric:10}{summary.median:8.4f}  {summary.interval}", flush=True)
    return row


def recipe_for(name: str, lr: float) -> Recipe:
    """Of one case."""
    plan = f"data={NUM_RANKS} topology=direct compress={CASES[name]}"
    return with_plan(with_settings(find_recipe("digits_mlp"), (*SETTINGS, f"optimizer.lr={lr}")), plan, None)


def train(name: str, recipe: Recipe, seed: int, epochs: int) -> dict[str, float]:
    """Loss and accuracy on the test set after so many epochs of all ranks."""
    splits, plan = build_splits(recipe), recipe.mutable.plan
    num_steps = epochs * -(-len(splits.train) // recipe.mutable.batch_size)

    def program(group: AbstractGroup) -> dict[str, float]:
        replicas = replicas_in(MeshGroups(group, plan.mesh(group.rank)), plan)
        task, state = build_task(recipe, splits, seed, replicas)
        replicas.join(state.model)
        for _ in range(num_steps):
            state, _ = take_step(task, state)
        return evaluate(task.executor, state.model, splits.test, ("accuracy",)) if group.rank == 0 else {}

    with use_determinism(), use_masking(name != UNMASKED):
        found: dict[str, float] = run_virtual(program, NUM_RANKS).results[0]
    return found


@contextmanager
def use_masking(is_masked: bool) -> Iterator[None]:
    """With or without momentum factor masking, in this process."""
    take = kernels.take

    def take_unmasked(kept: Tensor, places: Tensor, velocity: Tensor | None = None) -> Tensor:
        return take(kept, places)

    kernels.take = take if is_masked else take_unmasked  # type: ignore[assignment]
    try:
        yield
    finally:
        kernels.take = take


if __name__ == "__main__":
    main()
