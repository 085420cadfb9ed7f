"""Proof that workers and servers did what their record says: audited, followed by the equations, and repeated.

processes           train some batches, servers record what they decide      weights and optimizer state P
the audit           bounds held, nothing used twice or too late
the equations       the recorded updates, in one process without servers     P, to the last bit or to a tolerance
processes, again    the same decisions, whatever arrives when                P, to the last bit
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

from torch import Tensor

from weft.distributed.consistency.server import Decision, ServedReplicas, read_decisions
from weft.distributed.consistency.server.decisions import Commit
from weft.distributed.consistency.server.settings import may_cut
from weft.errors import CorruptFileError
from weft.graph import State
from weft.proving.audit import audit_arrival, audit_hosts, audit_rounds
from weft.proving.gradient_equations import Computed, Setup, follow_gradients
from weft.proving.held import elements_of_servers, layout_of, pack_layout, unpack_layout
from weft.proving.lockstep import whole_of
from weft.proving.method import AbstractMethod, Case, Evidence
from weft.proving.own_pace import train_to_the_end
from weft.proving.proof import Proof, are_equal, compare_all, copy_of, failed
from weft.proving.reference import Replica, gradients_at, replicas_of
from weft.specs import Batch, Plan
from weft.specs.loading import load
from weft.specs.plan import value_of
from weft.training.build import build_optimizer, build_task
from weft.training.loop import Task, TrainingState
from weft.training.optimizers import OptimizerState
from weft.training.replicas import AbstractReplicas
from weft.training.sampling import share

__all__ = ["Served", "audit", "follow_recipe", "hold_to_equations", "trace_end", "with_replay"]


@final
class Served(AbstractMethod):
    """For ranks that meet at servers."""

    @property
    def num_runs(self) -> int:
        return 2

    def steps_needed(self, plan: Plan, num_steps: int) -> int:
        """Of ranks that send weights, enough to see each visit the centre twice and come back."""
        return max(num_steps, 2 * plan.period + 1) if plan.sends == "weights" else num_steps

    def trace(self, case: Case, replicas: AbstractReplicas) -> dict[str, Tensor]:
        state, _ = train_to_the_end(case, replicas)
        return trace_end(case, replicas, state)

    def judge(self, case: Case, runs: Sequence[Evidence]) -> Proof:
        plan, first = case.plan, runs[0]
        found = unpack_layout(first.ranks[0])[1]
        if plan.splits_model:
            holders = [plan.mesh(0).holders_of(part)[0] for part in range(plan.mesh(0).num_parts)]
            case = replace(case, layouts=tuple(unpack_layout(first.ranks[rank])[0] for rank in holders))
        decisions = [read_decisions(first.folder, case.seed, server) for server in range(plan.num_servers)]
        joins = [read_decisions(first.folder, case.seed, host, "host") for host in range(plan.num_hosts)]
        faults = audit(plan, decisions, joins)
        if faults:
            return failed(faults[0], case.num_steps, case.tolerance)
        held = hold_to_equations(case, decisions, found)
        return with_replay(case, held, is_same=all(are_equal(first.ranks[0], run.ranks[0]) for run in runs[1:]))


def trace_end(case: Case, replicas: AbstractReplicas, state: TrainingState) -> dict[str, Tensor]:
    """The parameters and the optimizer's slots when all have ended, of the whole model; and, where ranks hold parts of
    it, what this one tells its servers of."""
    assert isinstance(replicas, ServedReplicas)
    with replicas.use_consensus(state.model):
        found = whole_of(state.model.parameters, replicas.collect(state.optimizer), replicas)
    if not case.plan.splits_model:
        return found
    return found | pack_layout(layout_of(replicas.placement, replicas.told))


def with_replay(case: Case, held: Proof, *, is_same: bool) -> Proof:
    """The first difference, or what was shown."""
    kept = f"{case.plan.num_replicas} workers kept their consistency for {case.num_steps} global batches"
    finding = f"{kept}, by the records of servers; {held.finding}; and again by its record, to the last bit"
    if not held.passed:
        finding = held.finding
    elif not is_same:
        finding = "the recorded decisions do not lead to the same weights and optimizer state"
    return replace(held, passed=held.passed and is_same, num_steps=case.num_steps, finding=finding)


def hold_to_equations(case: Case, decisions: Sequence[Sequence[Decision]], found: Mapping[str, Tensor]) -> Proof:
    """Compare the end of a training with that of the equations, updates being made as each shard recorded.

    Of ranks that send weights this is the centre, and nothing else: their own weights and optimizer state stay with
    them.
    """
    follow = load(value_of("consistency", case.plan.consistency).equations["servers"])
    what = "weights and optimizer state are"
    try:
        expected: dict[str, Tensor] = follow(case, decisions)
        if case.plan.sends == "weights":
            found, what = {name: found[name] for name in expected}, "the centre is"
    except CorruptFileError as error:
        return failed(str(error), 0, case.tolerance)
    num_updates = sum(isinstance(decision, Commit) for own in decisions for decision in own)
    if found.keys() != expected.keys():
        odd = min(found.keys() ^ expected.keys())
        return failed(f"servers and equations differ in what they keep ({odd})", num_updates, case.tolerance)
    compared = compare_all([("", found, expected)], case.tolerance)
    if compared.off:
        finding = f"{compared.off}, by the equations of what was recorded"
        return failed(finding, num_updates, case.tolerance, compared.largest)
    finding = f"{what} where the equations lead from {num_updates} recorded updates, {compared.how}"
    return Proof(True, compared.is_bitwise, num_updates, compared.largest, case.tolerance, finding)


def follow_recipe(case: Case, records: Sequence[Sequence[Decision]]) -> dict[str, Tensor]:
    """The parameters and slots at the end of a training, updates being made as each shard recorded.

    Raises:
        CorruptFileError: the records are not of one training.
    """
    task, state = build_task(case.recipe, case.splits, case.seed, dtype=case.dtype)
    plan, parameters = case.plan, state.model.parameters
    trained = {name: p.detach() for name, p in parameters.items() if p.requires_grad}
    setup = Setup(
        parameters=parameters,
        make_optimizer=lambda: build_optimizer(case.recipe),
        cuts=elements_of_servers(trained, plan.num_shards, may_cut=may_cut(task.optimizer), layouts=case.layouts),
        replicas=replicas_of(state, case.seed, plan.num_replicas),
        compute=lambda replica, batch, part: _compute(task, state.model, plan, replica, batch, part),
        clip_norm=task.clip_norm,
    )
    weights, slots = follow_gradients(plan, records, setup)
    return copy_of(weights, OptimizerState(state.optimizer.shared, slots))


def _compute(task: Task, model: State, plan: Plan, replica: Replica, number: int, part: int) -> Computed:
    place = task.sampler.state_at(number)
    indices, _ = task.sampler.next_batch(place)
    batch = task.splits.train.take(share(indices, part, plan.num_replicas), place.epoch)
    lr = task.optimizer.lr * task.schedule(task.sampler.samples_before(place))
    num_micro = plan.num_micro_batches if plan.pipeline > 1 else None
    return Computed(gradients_at(task, model, replica, batch, num_micro), _weigh(task, batch, indices), lr)


def _weigh(task: Task, batch: Batch, indices: Tensor) -> float:
    """How much a share counts in its batch: by targets where samples differ in them."""
    data = task.splits.train
    whole = data.take(indices).num_targets if data.has_padding() else 0
    return batch.num_targets / whole if whole else len(batch) / len(indices)


def audit(plan: Plan, decisions: Sequence[Sequence[Decision]], joins: Sequence[Sequence[Decision]] = ()) -> list[str]:
    """The faults in what shards decided, and in what host servers joined, by the rules of the plan's consistency."""
    faults = [fault for shard, own in enumerate(decisions) for fault in _audit_shard(plan, own, shard)]
    return faults + (audit_hosts(joins, decisions, plan.ranks_per_host) if joins else [])


def _audit_shard(plan: Plan, decisions: Sequence[Decision], shard: int) -> list[str]:
    options = dict(plan.consistency.parameters)
    if plan.commits_on_arrival:
        bound, inner = float(options.get("bound", math.inf)), plan.ranks_per_host
        return audit_arrival(decisions, plan.num_replicas, bound, shard=shard, inner=inner)
    return audit_rounds(
        decisions,
        plan.num_replicas,
        bound=int(options.get("bound", 0)),
        spare=int(options.get("workers", 0)),
        has_deadline=options.get("deadline", "none") != "none",
        shard=shard,
    )
