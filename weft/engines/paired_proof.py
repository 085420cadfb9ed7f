"""Proof on real ranks that they average in pairs: each traces its steps, what they recorded is done again here.

processes       train some batches; every rank records what happens to it, and keeps its weights after each step
the audit       work given out once, nobody asked who asks, no mean that one side knows nothing of
the equations   the record, in one process                                           the same weights after each step
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from weft.distributed.consistency.pairs import audit_pairs, compare_pairs, read_journals, trace_pairs
from weft.distributed.proof import Proof, Trace, copy_of
from weft.engines.local import run_ranks, threads_per_rank
from weft.engines.place import find_place
from weft.engines.proving import begin_apart, use_threads
from weft.engines.rank_program import RankProgram
from weft.engines.serving import Service, tolerance_of, use_replicas
from weft.planning.gossip_graphs import make_split
from weft.specs import parse_plan
from weft.torch_private import use_determinism
from weft.training.build import build_splits, check_recipe
from weft.training.datasets import Splits
from weft.training.events import Event
from weft.training.loop import TrainingState, train
from weft.training.recipe import Recipe
from weft.training.replicas import AbstractReplicas

__all__ = ["prove_paired", "trace_rank", "trace_training"]


def prove_paired(recipe: Recipe, *, seed: int = 0, num_steps: int = 5, tolerance: float = 1e-5) -> Proof:
    """Train some global batches of the recipe on the processes of its plan, and hold them to the equations."""
    check_recipe(recipe)
    plan = parse_plan(recipe.mutable.plan)
    with tempfile.TemporaryDirectory(prefix="weft-proof-") as text:
        folder = Path(text)
        arguments = {"recipe": recipe.to_dict(), "folder": text, "seed": seed, "num_steps": num_steps}
        program = RankProgram("weft.engines.paired_proof:trace_rank", arguments)
        run_ranks(program, plan.num_ranks, tolerance=tolerance_of(plan))
        journals = read_journals(folder, seed, plan.num_ranks)
        traces = [_read_trace(folder, rank) for rank in range(plan.num_ranks)]
        mean = load_file(folder / "mean.safetensors")
    faults = audit_pairs(journals, make_split(str(plan.consistency["graph"]), plan.num_ranks))
    if faults:
        return Proof(False, False, num_steps, float("inf"), tolerance, faults[0])
    with use_determinism(), use_threads(threads_per_rank(plan.num_ranks)):
        references, means = trace_pairs(recipe, build_splits(recipe), seed, journals)
    return compare_pairs(traces, references, (mean, means[max(means)]), tolerance)


def trace_rank(recipe: dict[str, object], folder: str, seed: int, num_steps: int) -> None:
    """The rank program of the proof: leaves what this rank did in the folder."""
    chosen, path = Recipe.from_dict(recipe), Path(folder)
    with use_replicas(Service(chosen, (seed,), run=path), find_place()) as replicas:
        assert replicas is not None, "ranks that average in pairs have no servers"
        with use_determinism():
            trace, mean = trace_training(chosen, build_splits(chosen), seed, num_steps, replicas)
        tensors = {f"{turn}/{name}": tensor for turn, step in enumerate(trace) for name, tensor in step.items()}
        save_file(tensors, path / f"rank-{replicas.rank}.safetensors")
        if replicas.rank == 0:
            save_file(mean, path / "mean.safetensors")


def trace_training(
    recipe: Recipe, splits: Splits, seed: int, num_steps: int, replicas: AbstractReplicas
) -> tuple[Trace, dict[str, Tensor]]:
    """Train some global batches as one of the ranks, which begin with other weights than rank 0: its own after each of
    its steps, and at the end the mean of all."""
    task, state = begin_apart(recipe, splits, seed, num_steps, replicas)
    trace: Trace = []

    def keep(after: TrainingState) -> None:
        trace.append(copy_of(after.model.parameters, after.optimizer))

    state, _ = train(task, state, emit=_hear_nothing, save=keep)
    replicas.sum(torch.zeros(1))
    with replicas.use_consensus(state.model):
        return trace, {name: tensor.detach().clone() for name, tensor in state.model.parameters.items()}


def _hear_nothing(_event: Event) -> None:
    pass


def _read_trace(folder: Path, rank: int) -> Trace:
    trace: Trace = []
    for key, tensor in load_file(folder / f"rank-{rank}.safetensors").items():
        turn, _, name = key.partition("/")
        trace += [{} for _ in range(int(turn) + 1 - len(trace))]
        trace[int(turn)][name] = tensor
    return trace
