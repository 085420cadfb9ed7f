"""Proof that workers and servers did what their record says: audited, followed by the equations, and repeated.

processes           train some batches, servers record what they decide      weights and optimizer state P
the audit           bounds held, nothing used twice or too late
the equations       the recorded updates, in one process without servers     P, to the last bit or to a tolerance
processes, again    the same decisions, whatever arrives when                P, to the last bit
"""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from weft.distributed.consistency.server import (
    Decision,
    audit_arrival,
    audit_hosts,
    audit_rounds,
    compare_ends,
    follow_recipe,
    read_decisions,
)
from weft.distributed.consistency.server.elastic_proof import follow_centre
from weft.distributed.proof import Proof, copy_of
from weft.engines.local import run_ranks, threads_per_rank
from weft.engines.place import find_place
from weft.engines.proving import begin_apart, use_threads
from weft.engines.rank_program import RankProgram
from weft.engines.serving import Service, tolerance_of, use_replicas
from weft.errors import CorruptFileError
from weft.specs import Plan, parse_plan
from weft.torch_private import use_determinism
from weft.training.build import build_splits, check_recipe
from weft.training.datasets import Splits
from weft.training.events import Listener
from weft.training.loop import train
from weft.training.recipe import Recipe
from weft.training.replicas import AbstractReplicas

__all__ = ["audit", "hold_to_equations", "prove_served", "trace_rank", "trace_training"]


def prove_served(recipe: Recipe, *, seed: int = 0, num_steps: int = 5, tolerance: float = 1e-5) -> Proof:
    """Train some global batches of the recipe on the processes of its plan, audit what was decided, hold where that led
    to the equations, and repeat it."""
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
            program = RankProgram("weft.engines.served_proof:trace_rank", arguments)
            run_ranks(program, plan.num_processes, tolerance=tolerance_of(plan))
        decisions = [read_decisions(first, seed, shard) for shard in range(int(plan.topology["shards"]))]
        joins = [read_decisions(first, seed, host, "host") for host in range(plan.num_hosts)]
        ends = [load_file(_end_of(run)) for run in (first, again)]
    faults = audit(plan, decisions, joins)
    if faults:
        return Proof(False, False, num_steps, math.inf, tolerance, faults[0])
    with use_determinism(), use_threads(threads_per_rank(plan.num_processes)):
        held = hold_to_equations(recipe, build_splits(recipe), seed, decisions, ends[0], tolerance)
    return judge(plan, num_steps, held, is_same=_are_same(*ends))


def hold_to_equations(
    recipe: Recipe,
    splits: Splits,
    seed: int,
    decisions: Sequence[Sequence[Decision]],
    found: Mapping[str, Tensor],
    tolerance: float = 1e-5,
) -> Proof:
    """What a training ended with against where the equations lead, updates being made as each shard recorded.

    Of elastic ranks this is the centre, and nothing else: their own weights and optimizer state stay with them.
    """
    plan = parse_plan(recipe.mutable.plan)
    try:
        if plan.consistency.name == "elastic":
            expected, what = follow_centre(recipe, splits, seed, plan, decisions), "the centre is"
            found = {name: found[name] for name in expected}
        else:
            expected, what = follow_recipe(recipe, splits, seed, plan, decisions), "weights and optimizer state are"
    except CorruptFileError as error:
        return Proof(False, False, 0, math.inf, tolerance, str(error))
    return compare_ends(found, expected, decisions, tolerance, what)


def judge(plan: Plan, num_steps: int, held: Proof, *, is_same: bool) -> Proof:
    """The first difference, or what was shown."""
    kept = f"{plan.num_ranks} workers kept their consistency for {num_steps} global batches, by the records of servers"
    finding = f"{kept}; {held.finding}; and again by its record, to the last bit"
    if not held.passed:
        finding = held.finding
    elif not is_same:
        finding = "the recorded decisions do not lead to the same weights and optimizer state"
    return replace(held, passed=held.passed and is_same, num_steps=num_steps, finding=finding)


def audit(plan: Plan, decisions: Sequence[Sequence[Decision]], joins: Sequence[Sequence[Decision]] = ()) -> list[str]:
    """The faults in what shards decided, and in what host servers joined, by the rules of the plan's consistency."""
    faults = [fault for shard, own in enumerate(decisions) for fault in _audit_shard(plan, own, shard)]
    return faults + (audit_hosts(joins, decisions, int(plan.topology["inner"])) if joins else [])


def _audit_shard(plan: Plan, decisions: Sequence[Decision], shard: int) -> list[str]:
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
        shard=shard,
    )


def trace_rank(recipe: dict[str, object], folder: str, seed: int, num_steps: int, replay: str | None) -> None:
    """The program of the proof: servers leave their records in the folder, rank 0 what all ended with."""
    chosen, path = Recipe.from_dict(recipe), Path(folder)
    service = Service(chosen, (seed,), run=path, replay=None if replay is None else Path(replay))
    with use_replicas(service, find_place()) as replicas:
        if replicas is None:
            return
        with use_determinism():
            end = trace_training(chosen, build_splits(chosen), seed, num_steps, replicas)
        if replicas.rank == 0:
            save_file(end, _end_of(path))


def trace_training(
    recipe: Recipe,
    splits: Splits,
    seed: int,
    num_steps: int,
    replicas: AbstractReplicas,
    emit: Listener = lambda _event: None,
) -> dict[str, Tensor]:
    """Train some global batches as one of the ranks, which begin with other weights than rank 0; the parameters and the
    optimizer's slots when all have ended."""
    task, state = begin_apart(recipe, splits, seed, num_steps, replicas)
    state, _ = train(task, state, emit=emit, save=lambda _state: None)
    replicas.sum(torch.zeros(1))
    with replicas.use_consensus(state.model):
        return copy_of(state.model.parameters, replicas.collect(state.optimizer))


def _end_of(run: Path) -> Path:
    return run / "end.safetensors"


def _are_same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
