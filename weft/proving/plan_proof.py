"""`prove`: the ranks of a plan train some steps, and what they did is held to one rank, or to the equations."""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from weft.distributed.place import LaunchedPlace
from weft.distributed.realise import RunSpec, realise
from weft.engines.local import run_ranks, threads_per_rank
from weft.engines.rank_program import RankProgram
from weft.engines.tolerance import tolerance_of
from weft.errors import UsageError
from weft.proving.compressed_sums import check_compressed
from weft.proving.lockstep import Lockstep
from weft.proving.method import AbstractMethod, Case, Evidence
from weft.proving.paired import Paired
from weft.proving.proof import Proof
from weft.proving.rounded import Rounded, check_rounded, step_of
from weft.proving.served import Served
from weft.proving.streamed import Streamed
from weft.specs import Plan, as_plan
from weft.specs.roles import Channel
from weft.torch_private import use_determinism
from weft.training.build import build_splits, check_recipe
from weft.training.process import use_threads
from weft.training.recipe import Recipe

__all__ = ["METHODS", "method_of", "prove", "trace_rank"]

METHODS: Mapping[Channel, AbstractMethod] = {
    "all_reduce": Lockstep(),
    "servers": Served(),
    "neighbours": Paired(),
}

ROUNDED = Rounded()
"""Of activations that travel in a format of fewer bits."""

STREAMED = Streamed()
"""Of pipelines that are never emptied."""


def method_of(plan: Plan) -> AbstractMethod:
    """Synchronous ranks take the same steps, whichever way they reach each other; where they round activations, from
    where they were."""
    check_compressed(plan)
    if step_of(plan):
        check_rounded(plan)
        return ROUNDED
    if plan.is_streamed:
        return STREAMED
    return METHODS["all_reduce" if plan.is_synchronous else plan.channel]


def prove(
    recipe: Recipe,
    plan: Plan | str | None = None,
    *,
    seed: int = 0,
    num_steps: int = 5,
    tolerance: float = 1e-5,
    in_float64: bool = False,
) -> Proof:
    """Show that a plan computes what one rank computes, or what the equations of its consistency say.

    Args:
        recipe: what is trained.
        plan: on which ranks; by default the recipe's own.
        num_steps: global batches to train on; more where fewer would not show what the plan does.
        tolerance: the largest error, as a share of a tensor's largest value, where bits may differ.
        in_float64: compute in that type, in which an error that is not rounding cannot hide.
    """
    if plan is not None:
        recipe = replace(recipe, mutable=replace(recipe.mutable, plan=as_plan(plan)))
    check_recipe(recipe)
    chosen = recipe.mutable.plan
    method = method_of(chosen)
    if in_float64 and method not in (METHODS["all_reduce"], STREAMED, ROUNDED):
        raise UsageError(f"ranks of this plan are proved in the type of the recipe ({chosen}); leave --float64 out")
    num_steps = method.steps_needed(chosen, num_steps)
    with tempfile.TemporaryDirectory(prefix="weft-proof-") as folder:
        runs: list[Evidence] = []
        for number in range(method.num_runs):
            run = Path(folder) / f"run-{number}"
            run.mkdir()
            runs.append(
                _gather(recipe, run, seed, num_steps, replay=runs[0].folder if runs else None, in_float64=in_float64)
            )
        with use_determinism(), use_threads(threads_per_rank(chosen.roles.num_processes)):
            return method.judge(
                Case(recipe, build_splits(recipe), seed, num_steps, tolerance, dtype=_dtype(in_float64)), runs
            )


def _gather(recipe: Recipe, run: Path, seed: int, num_steps: int, replay: Path | None, *, in_float64: bool) -> Evidence:
    """Train on the processes of the plan, and read what its ranks left."""
    plan = recipe.mutable.plan
    arguments = {"recipe": recipe.to_dict(), "folder": str(run), "seed": seed, "num_steps": num_steps}
    arguments["in_float64"] = in_float64
    arguments["replay"] = None if replay is None else str(replay)
    program = RankProgram("weft.proving.plan_proof:trace_rank", arguments)
    run_ranks(program, plan.roles.num_processes, tolerance=tolerance_of(plan))
    return Evidence([load_file(_file_of(run, rank)) for rank in range(plan.num_ranks)], run)


def trace_rank(
    recipe: dict[str, object], folder: str, seed: int, num_steps: int, replay: str | None, in_float64: bool
) -> None:
    """The rank program of a proof: leaves what this rank did in the folder, and servers what they decided."""
    chosen, run = Recipe.from_dict(recipe), Path(folder)
    spec = RunSpec.of(chosen, (seed,), run=run, replay=None if replay is None else Path(replay))
    plan = chosen.mutable.plan
    place = LaunchedPlace().on(chosen.mutable.device)
    with realise(plan, place, spec) as replicas:
        if replicas is None:
            return
        with use_determinism():
            case = Case(
                chosen,
                build_splits(chosen),
                seed,
                num_steps,
                device=place.device,
                dtype=_dtype(in_float64),
            )
            found = method_of(plan).trace(case, replicas)
        save_file(found, _file_of(run, replicas.mesh.rank))


def _dtype(in_float64: bool) -> torch.dtype | None:
    return torch.float64 if in_float64 else None


def _file_of(run: Path, rank: int) -> Path:
    return run / f"rank-{rank}.safetensors"
