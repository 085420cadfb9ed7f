"""The virtual cluster against real ranks, and what it takes to train on 256 of them.

    python -m benchmarks.virtual_cluster [--rounds 15] [--skip-training] [--out benchmarks/results/virtual_cluster.json]

Two real ranks, of one thread each, go through rounds. In each round both measure, at the same time, what their
computation costs and what a message costs, and then train some steps. Of all that was measured the fifth percentile
counts: other work on the machine only ever makes things slower, and a rank that lost its core makes the other one wait,
which is no property of either model. The virtual cluster is given the costs, and the step time that it predicts for the
same recipe is held against the real one. Nothing is fitted to the step time itself. On a busy machine the error says
more about the machine than about the model, so the load is told too.

The training is `digits_mlp` on 256 virtual ranks to its 97% on the test set, at least one sample per rank and step.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from weft.atomic import write_json
from weft.distributed.channels.all_reduce import replicas_in
from weft.distributed.collectives import probe
from weft.distributed.place import Kind, find_launch, open_group
from weft.distributed.placement import MeshGroups
from weft.engines.local import run_ranks
from weft.engines.rank_program import RankProgram
from weft.planning.cluster import Link
from weft.planning.network import NetworkModel, fit_alpha_beta
from weft.recipes import find_recipe
from weft.records.machine import describe_machine, describe_source, describe_versions
from weft.records.run_folder import create_run_folder
from weft.runs.job import with_plan, with_settings
from weft.simulation.computation import ComputeModel
from weft.simulation.probing import seconds_per_byte_reduced
from weft.simulation.simulation import Simulation, simulate
from weft.simulation.timing import measure_computation
from weft.training.build import build_splits, build_task
from weft.training.loop import take_step
from weft.training.recipe import Recipe

__all__ = ["main", "measure_rank", "predict", "undisturbed"]

RESULTS = Path(__file__).parent / "results" / "virtual_cluster.json"
NUM_RANKS, NUM_STEPS, NUM_WARM_UPS = 2, 10, 2
TRANSPORTS: dict[str, Kind] = {"shared memory": "shared_memory", "Gloo": "torch"}
CASES: dict[str, tuple[str, ...]] = {
    "digits_mlp": (),
    "digits_mlp, 2 x 1024 hidden, batch 128": ("model.hidden=(1024, 1024)", "batch_size=128"),
}
TRAINING = (
    "epochs=16",
    "batch_size=315",
    "optimizer.lr=0.03",
    "optimizer.beta2=0.99",
    "schedule.warmup_epochs=3",
)
"""1257 samples in steps of 315, the last of an epoch 312: no rank of 256 is ever without a sample."""
TRAINING_RANKS = 256


def recipe_of(settings: Sequence[str], num_ranks: int) -> Recipe:
    return with_plan(with_settings(find_recipe("digits_mlp"), settings), None, num_ranks)


def measure_rank(recipe: dict[str, Any], kind: Kind, num_rounds: int) -> list[dict[str, Any]]:
    """The rank program: for each round the compute model, the seconds of messages and the seconds of every step."""
    torch.set_num_threads(1)
    chosen = Recipe.from_dict(recipe)
    splits = build_splits(chosen)
    group = open_group(find_launch(), kind)
    try:
        plan = chosen.mutable.plan
        replicas = replicas_in(MeshGroups(group, plan.mesh(group.rank)), plan)
        task, state = build_task(chosen, splits, 0, replicas)
        replicas.join(state.model)
        rounds = []
        for _ in range(num_rounds):
            group.barrier()
            compute = measure_computation(chosen, splits, chosen.mutable.batch_size // group.size)
            group.barrier()
            fit, gamma, seconds = probe(group), seconds_per_byte_reduced(), []
            for _ in range(NUM_WARM_UPS + NUM_STEPS):
                began = time.perf_counter()
                state, _ = take_step(task, state)
                seconds.append(time.perf_counter() - began)
            told = {"sizes": fit.sizes, "times": fit.times, "gamma": gamma, "compute": asdict(compute)}
            rounds.append({**told, "step_seconds": seconds[NUM_WARM_UPS:]})
        return rounds
    finally:
        group.close()


def undisturbed(values: Sequence[float]) -> float:
    return float(np.quantile(values, 0.05))


def predict(recipe: Recipe, ranks: Sequence[Sequence[dict[str, Any]]]) -> Simulation:
    """Simulate with what the ranks measured while they were not disturbed."""
    rounds = [found for rank in ranks for found in rank]
    times = [undisturbed(column) for column in zip(*(found["times"] for found in rounds), strict=True)]
    network = NetworkModel(
        Link(*fit_alpha_beta(rounds[0]["sizes"], times)), gamma=undisturbed([found["gamma"] for found in rounds])
    )
    models = [found["compute"] for found in rounds]
    num_samples = recipe.mutable.batch_size // len(ranks)
    passes = [m["seconds_per_pass"] + num_samples * m["seconds_per_sample"] for m in models]
    compute = ComputeModel(
        seconds_per_pass=undisturbed(passes),
        seconds_per_sample=0.0,  # every step has the same share
        seconds_per_update=undisturbed([m["seconds_per_update"] for m in models]),
        ready={name: median(m["ready"][name] for m in models) for name in models[0]["ready"]},
    )
    with tempfile.TemporaryDirectory() as folder:
        place = create_run_folder(Path(folder) / "run", recipe.name)
        return simulate(recipe, folder=place, network=network, compute=compute)


def calibrate(case: str, transport: str, num_rounds: int) -> dict[str, Any]:
    recipe = recipe_of((*CASES[case], "epochs=2"), NUM_RANKS)
    arguments = {"recipe": recipe.to_dict(), "kind": TRANSPORTS[transport], "num_rounds": num_rounds}
    ranks = run_ranks(RankProgram("benchmarks.virtual_cluster:measure_rank", arguments), NUM_RANKS)
    steps = [1e3 * seconds for found in ranks[0] for seconds in found["step_seconds"]]
    simulation = predict(recipe, ranks)
    real, predicted = undisturbed(steps), 1e3 * simulation.record.repetitions[0].values["step_time"]
    return {
        "benchmark": "virtual_cluster",
        "case": case,
        "transport": transport,
        "real_ms": real,
        "predicted_ms": predicted,
        "error_percent": 100 * (predicted / real - 1),
        "raw_ms": steps,
        "raw_model": {"network": asdict(simulation.network), "compute": asdict(simulation.compute)},
    }


def train_on_many() -> dict[str, Any]:
    """Train on 256 virtual ranks; seconds of this machine, and of its processor."""
    recipe = recipe_of(TRAINING, TRAINING_RANKS)
    began, cpu_began = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        simulation = simulate(recipe, folder=create_run_folder(Path(folder) / "run", recipe.name))
    repetition = simulation.record.repetitions[0]
    return {
        "command": f"weft simulate digits_mlp --ranks {TRAINING_RANKS} " + " ".join(f"--set {s}" for s in TRAINING),
        "num_ranks": simulation.num_ranks,
        "num_steps": len(repetition.series["step_time"]),
        "test_accuracy": repetition.values["test/accuracy"],
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu_began,
        "virtual_seconds": simulation.virtual_seconds,
        "num_events": simulation.num_events,
        "num_messages": simulation.num_messages,
        "events_per_second": simulation.events_per_second,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    rows = []
    for case in CASES:
        for transport in TRANSPORTS:
            rows.append(calibrate(case, transport, options.rounds))
            row = rows[-1]
            print(
                f"{case:<40}{transport:<15}real {row['real_ms']:.3f} ms, predicted {row['predicted_ms']:.3f} ms, "
                f"error {row['error_percent']:+.1f}%",
                flush=True,
            )
    document: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": describe_machine(),
        "load_average": os.getloadavg(),  # as the calibration ended: 2 for two ranks alone
        "versions": describe_versions(),
        "source": describe_source(),
        "rows": rows,
    }
    if not options.skip_training:
        document["training"] = train_on_many()
        print(*(f"{key}: {value}" for key, value in document["training"].items()), sep="\n")
    if options.out:
        write_json(options.out, document)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Hold the virtual cluster against two real ranks.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--skip-training", action="store_true")
    parser.add_argument("--out", type=Path, help=f"write the results here, e.g. {RESULTS}")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
