"""Proof that workers and servers did what their record says: audited, and repeated to the last bit.

processes           train some steps, servers record what they decide     parameters P
the audit           bounds held, nothing used twice or too late; of elastic ranks, the centre is where the equations
                    lead, followed in one process
processes, again    the same decisions, whatever arrives when             parameters Q = P
"""

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

from weft.distributed.consistency.server import Decision, audit_arrival, audit_hosts, audit_rounds, read_decisions
from weft.distributed.consistency.server.elastic_proof import follow_centre
from weft.distributed.proof import Proof
from weft.engines.local import run_ranks, threads_per_rank
from weft.engines.place import find_place
from weft.engines.program import Program
from weft.engines.proving import use_threads
from weft.engines.serving import Service, tolerance_of, use_replicas
from weft.metrics.record_file import read_record
from weft.metrics.run_folder import RunFolder
from weft.specs import Plan, parse_plan
from weft.torch_private import use_determinism
from weft.training.build import build_splits, check_recipe
from weft.training.events import Event, StepEnded, StopTraining
from weft.training.recipe import Recipe
from weft.training.results import hash_tensors
from weft.training.run import run_recipe

__all__ = ["audit", "audit_centre", "prove_served", "train_recorded"]


def prove_served(recipe: Recipe, *, seed: int = 0, num_steps: int = 5) -> Proof:
    """Train some global batches of the recipe on the processes of its plan, audit what was decided, and repeat it."""
    check_recipe(recipe)
    plan = parse_plan(recipe.mutable.plan)
    # Of elastic ranks, enough to see each visit the centre twice and come back.
    num_steps = max(num_steps, 2 * int(dict(plan.consistency.parameters).get("steps", 0)) + 1)
    with tempfile.TemporaryDirectory(prefix="weft-proof-") as folder:
        first, again = Path(folder) / "first", Path(folder) / "again"
        for run, replay in ((first, None), (again, first)):
            run.mkdir()
            arguments = {"recipe": recipe.to_dict(), "folder": str(run), "seed": seed, "num_steps": num_steps}
            arguments["replay"] = None if replay is None else str(replay)
            program = Program("weft.engines.served_proof:train_recorded", arguments)
            run_ranks(program, plan.num_processes, tolerance=tolerance_of(plan))
        decisions = [read_decisions(first, seed, shard) for shard in range(int(plan.topology["shards"]))]
        joins = [read_decisions(first, seed, host, "host") for host in range(plan.num_hosts)]
        hashes = [read_record(run).repetitions[0].hashes for run in (first, again)]
    faults = [fault for shard, own in enumerate(decisions) for fault in audit(plan, own, shard)]
    if joins:
        faults += audit_hosts(joins, decisions, int(plan.topology["inner"]))
    if plan.consistency.name == "elastic":
        num_threads = threads_per_rank(plan.num_processes)
        faults += audit_centre(recipe, seed, decisions, hashes[0]["parameters"], num_threads)
    return judge(plan, num_steps, faults, is_same=hashes[0] == hashes[1])


def audit_centre(
    recipe: Recipe, seed: int, decisions: Sequence[Sequence[Decision]], found: str, num_threads: int
) -> list[str]:
    """Whether the centre is where the equations lead, visits being made as each shard decided; `found` is its hash."""
    with use_determinism(), use_threads(num_threads):
        centre = follow_centre(recipe, build_splits(recipe), seed, parse_plan(recipe.mutable.plan), decisions)
    is_there = hash_tensors(centre) == found
    return [] if is_there else ["the centre is not where the equations lead from what was recorded"]


def judge(plan: Plan, num_steps: int, faults: Sequence[str], *, is_same: bool) -> Proof:
    """The first fault, or what was shown."""
    finding = f"{plan.num_ranks} workers kept their consistency for {num_steps} global batches, and again by its record"
    finding = f"{finding}, to the last bit" if is_same else "the recorded decisions do not lead to the same parameters"
    is_passed = is_same and not faults
    return Proof(is_passed, is_same, num_steps, 0.0 if is_same else math.inf, 0.0, faults[0] if faults else finding)


def audit(plan: Plan, decisions: Sequence[Decision], shard: int = 0) -> list[str]:
    """The faults in what a shard decided, by the rules of the plan's consistency."""
    options = dict(plan.consistency.parameters)
    if plan.consistency.name in ("async", "elastic") or options.get("commit") == "arrival":
        bound, inner = float(options.get("bound", math.inf)), int(dict(plan.topology.parameters).get("inner", 1))
        return audit_arrival(decisions, plan.num_ranks, bound, shard=shard, inner=inner)
    return audit_rounds(
        decisions,
        plan.num_ranks,
        bound=int(options.get("bound", 0)),
        spare=int(options.get("workers", 0)),
        has_deadline=options.get("deadline", "none") != "none",
    )


def train_recorded(recipe: dict[str, object], folder: str, seed: int, num_steps: int, replay: str | None) -> None:
    """The rank program of the proof: rank 0 has all stop after some steps of its own."""

    def stop(event: Event) -> None:
        if isinstance(event, StepEnded) and event.progress.step >= num_steps:
            raise StopTraining(f"{num_steps} global batches were enough")

    chosen = Recipe.from_dict(recipe)
    service = Service(chosen, (seed,), run=Path(folder), replay=None if replay is None else Path(replay))
    with use_replicas(service, find_place()) as replicas:
        if replicas is not None:
            run_recipe(chosen, folder=RunFolder(Path(folder)), seeds=(seed,), listeners=[stop], replicas=replicas)
