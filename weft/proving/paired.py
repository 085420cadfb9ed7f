"""Proof that ranks average with their neighbours: each traces its steps, what they recorded is done again here.

processes       train some batches; every rank records what happens to it, and keeps its weights after each step
the audit       work given out once, nobody asked who asks, no mean that one side knows nothing of
the equations   the record, in one process                                           the same weights after each step
"""

from collections.abc import Mapping, Sequence
from typing import final

from torch import Tensor

from weft.distributed.consistency.pairs import read_journals
from weft.planning.gossip_graphs import make_split
from weft.proving.audit import audit_pairs
from weft.proving.method import AbstractMethod, Case, Evidence
from weft.proving.own_pace import train_to_the_end
from weft.proving.pair_equations import trace_pairs
from weft.proving.proof import Proof, Trace, compare_all, copy_to_host, failed, pack_trace, unpack_trace
from weft.specs import Plan
from weft.training.replicas import AbstractReplicas

__all__ = ["Paired", "compare_pairs"]

MEAN = "mean/"


@final
class Paired(AbstractMethod):
    """For ranks that reach their neighbours alone."""

    @property
    def num_runs(self) -> int:
        return 1

    def steps_needed(self, plan: Plan, num_steps: int) -> int:
        return num_steps

    def trace(self, case: Case, replicas: AbstractReplicas) -> dict[str, Tensor]:
        """This rank's own weights after each of its steps, and at the end the mean of all."""
        state, trace = train_to_the_end(case, replicas)
        with replicas.use_consensus(state.model):
            mean = {f"{MEAN}{name}": tensor for name, tensor in copy_to_host(state.model.parameters).items()}
        return {**pack_trace(trace), **mean}

    def judge(self, case: Case, runs: Sequence[Evidence]) -> Proof:
        plan, run = case.plan, runs[0]
        journals = read_journals(run.folder, case.seed, plan.num_ranks)
        faults = audit_pairs(journals, make_split(str(plan.consistency["graph"]), plan.num_ranks))
        if faults:
            return failed(faults[0], case.num_steps, case.tolerance)
        references, means = trace_pairs(case, journals)
        mean = {key.removeprefix(MEAN): tensor for key, tensor in run.ranks[0].items() if key.startswith(MEAN)}
        traces = [unpack_trace(found) for found in run.ranks]
        return compare_pairs(traces, references, (mean, means[max(means)]), case.tolerance)


def compare_pairs(
    ranks: Sequence[Trace],
    references: Sequence[Trace],
    means: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    tolerance: float = 1e-5,
) -> Proof:
    """Every rank after each of its steps, and the mean that was judged at the end, against the reference."""
    num_steps = sum(map(len, references))
    for rank, (trace, reference) in enumerate(zip(ranks, references, strict=True)):
        if [step.keys() for step in trace] != [step.keys() for step in reference]:
            return failed(f"rank {rank} did not trace the steps and tensors that it recorded", num_steps, tolerance)
    held = [
        (f"after step {turn + 1} of rank {rank}, ", found, expected)
        for rank, (trace, reference) in enumerate(zip(ranks, references, strict=True))
        for turn, (found, expected) in enumerate(zip(trace, reference, strict=True))
    ]
    compared = compare_all([*held, ("in the mean of all ranks, ", *means)], tolerance)
    if compared.off:
        return failed(compared.off, num_steps, tolerance, compared.largest)
    finding = f"{len(ranks)} ranks averaged by the equations for {num_steps} steps in all, {compared.how}"
    return Proof(True, compared.is_bitwise, num_steps, compared.largest, tolerance, finding)
