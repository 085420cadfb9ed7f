"""Proof that workers and servers did what their record says: audited, and repeated on the virtual cluster.

real processes     train some steps, servers record what they decide          parameters P
the audit          bounds held, nothing used twice or too late
virtual cluster    the same decisions, other transports, other timing         parameters Q = P, to the last bit
"""

import math
import tempfile
from dataclasses import replace
from pathlib import Path

from weft.distributed.consistency.server import Decision, audit_arrival, audit_rounds, read_decisions
from weft.distributed.proof import Proof
from weft.engines.local import run_ranks, threads_per_rank
from weft.engines.place import find_place
from weft.engines.program import Program
from weft.engines.proving import use_threads
from weft.engines.serving import Service, tolerance_of, use_replicas
from weft.engines.simulation import simulate
from weft.metrics.record_file import read_record
from weft.metrics.run_folder import RunFolder, create_run_folder
from weft.specs.plan import Choice
from weft.training.build import build_splits, check_recipe
from weft.training.recipe import Recipe
from weft.training.run import run_recipe

__all__ = ["audit", "prove_served", "train_recorded"]


def prove_served(recipe: Recipe, *, seed: int = 0, num_steps: int = 5) -> Proof:
    """Train some global batches of the recipe on the processes of its plan, audit what was decided, and repeat it."""
    check_recipe(recipe)
    samples = len(build_splits(recipe).train)
    epochs = num_steps * recipe.mutable.batch_size / samples
    short = replace(recipe, fixed=replace(recipe.fixed, epochs=epochs, target=None))
    service = Service(short, (seed,))
    plan = service.plan
    with tempfile.TemporaryDirectory(prefix="weft-proof-") as folder:
        first, again = Path(folder) / "first", create_run_folder(Path(folder) / "again", recipe.name)
        arguments = {"recipe": short.to_dict(), "folder": str(first), "seed": seed}
        program = Program("weft.engines.served_proof:train_recorded", arguments)
        run_ranks(program, plan.num_processes, tolerance=tolerance_of(plan))
        shards = range(int(plan.topology["shards"]))
        decisions = [read_decisions(first, seed, shard) for shard in shards]
        faults = [
            fault for shard in shards for fault in audit(plan.consistency, decisions[shard], plan.num_ranks, shard)
        ]
        with use_threads(threads_per_rank(plan.num_processes)):
            repeated = simulate(short, folder=again, seeds=(seed,), compute=1e-3, replay=first).record
        is_same = repeated.repetitions[0].hashes == read_record(first).repetitions[0].hashes
    if not is_same:
        faults.append("the recorded decisions do not lead to the same parameters")
    updates = len(decisions[0])
    finding = (
        faults[0]
        if faults
        else (
            f"{plan.num_ranks} workers kept their consistency for {num_steps} global batches ({updates} decisions), "
            "and their record repeats them to the last bit"
        )
    )
    return Proof(not faults, is_same, num_steps, 0.0 if is_same else math.inf, 0.0, finding)


def audit(consistency: Choice, decisions: list[Decision], num_workers: int, shard: int = 0) -> list[str]:
    """The faults in what a shard decided, by the rules of its consistency."""
    options = dict(consistency.parameters)
    if consistency.name == "async" or options.get("commit") == "arrival":
        return audit_arrival(decisions, num_workers, float(options.get("bound", math.inf)), shard=shard)
    return audit_rounds(
        decisions,
        num_workers,
        bound=int(options.get("bound", 0)),
        spare=int(options.get("workers", 0)),
        has_deadline=options.get("deadline", "none") != "none",
    )


def train_recorded(recipe: dict[str, object], folder: str, seed: int) -> None:
    """The rank program of the proof."""
    chosen = Recipe.from_dict(recipe)
    with use_replicas(Service(chosen, (seed,), run=Path(folder)), find_place()) as replicas:
        if replicas is not None:
            run_recipe(chosen, folder=RunFolder(Path(folder)), seeds=(seed,), replicas=replicas)
