"""Training on the virtual cluster: the code that real ranks run, real mathematics, virtual time."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

from weft.distributed.collectives import AlgorithmChoice, AlgorithmName
from weft.distributed.group.group import AbstractGroup
from weft.distributed.group.virtual import TEN_GIGABIT, Span, run_virtual
from weft.distributed.placement import carry_out
from weft.engines.computation import ComputeModel, charge_task, spread_evenly
from weft.engines.proving import use_threads
from weft.engines.timing import measure_computation
from weft.errors import UsageError
from weft.metrics.record import RunRecord
from weft.metrics.run_folder import RunFolder
from weft.planning.network import NetworkModel
from weft.specs import Plan, parse_plan
from weft.specs.plan import Choice
from weft.torch_private import use_determinism
from weft.training.build import build_splits, build_task, check_recipe
from weft.training.datasets import Splits
from weft.training.events import Listener
from weft.training.recipe import Recipe
from weft.training.run import run_recipe
from weft.training.surroundings import Surroundings

__all__ = ["Simulation", "simulate"]

# A rank may well compute for minutes; that a peer is lost is not what this simulates.
TIMEOUT_SECONDS = 1e6


@dataclass(frozen=True)
class Simulation:
    """The record that rank 0 wrote, in virtual time, and what the simulation itself took."""

    record: RunRecord
    num_ranks: int
    network: NetworkModel
    compute: ComputeModel
    virtual_seconds: float  # until the last rank ended, measurements after the training included
    num_bytes: int  # sent, by all ranks together
    num_messages: int
    num_events: int
    real_seconds: float
    trace: tuple[Span, ...] = ()

    @property
    def events_per_second(self) -> float:
        return self.num_events / self.real_seconds


def simulate(
    recipe: Recipe,
    *,
    folder: RunFolder,
    seeds: Sequence[int] = (0,),
    network: NetworkModel = TEN_GIGABIT,
    compute: ComputeModel | float | None = None,
    listeners: Sequence[Listener] = (),
    trace: bool = False,
) -> Simulation:
    """Run the recipe with its plan on virtual ranks of one thread each, and write the record.

    The same recipe, seed, network and compute model give the same record, times included.

    Args:
        compute: what a rank's computation costs, or the seconds of one step; measured here and now if not given.
        trace: keep what every rank and its network side did when.
    """
    check_recipe(recipe)
    plan = parse_plan(recipe.mutable.plan)
    try:
        splits = build_splits(recipe)
        model = compute if isinstance(compute, ComputeModel) else _model_of(recipe, splits, plan, compute)
    except UsageError:  # nothing has begun, so nothing stays
        folder.discard()
        raise

    def program(group: AbstractGroup) -> RunRecord:
        surroundings = Surroundings(
            now=group.clock.now,
            load=lambda _recipe: splits,
            prepare=lambda task: charge_task(task, model, group.clock),
            clock_rules=clock_rules(network, model),
            is_virtual=True,
        )
        replicas = carry_out(_over_messages(plan), group, buffers=recipe.mutable.buffers)
        return run_recipe(
            recipe, folder=folder, seeds=seeds, listeners=listeners, replicas=replicas, surroundings=surroundings
        )

    began = time.perf_counter()
    # Ranks share the switches of the process: set here, they are found and left as they are by every rank.
    with use_determinism(), use_threads(1), use_one_core():
        result = run_virtual(
            program,
            plan.num_ranks,
            network=network,
            choice=choice_of(plan, network),
            timeout=TIMEOUT_SECONDS,
            trace=trace,
        )
    return Simulation(
        record=result.results[0],
        num_ranks=plan.num_ranks,
        network=network,
        compute=model,
        virtual_seconds=max(result.seconds),
        num_bytes=sum(result.bytes_sent),
        num_messages=result.num_messages,
        num_events=result.num_events,
        real_seconds=time.perf_counter() - began,
        trace=result.trace,
    )


@contextmanager
def use_one_core() -> Iterator[None]:
    """Keep this thread, and those that it starts, on one core: only one of them ever runs, and to wake it on another
    core takes longer than most of what it then does. Two processes choose different cores where they can."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[os.getpid() % len(before)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def clock_rules(network: NetworkModel, compute: ComputeModel) -> str:
    """What the times of a simulated run mean, in words."""
    inside = f" ({network.inside.alpha:g} s and {network.inside.beta:g} s/B inside a host)" if network.inside else ""
    return (
        "time is virtual and starts when the ranks do; nothing is saved on the way; a message takes "
        f"{network.between.alpha:g} s and {network.between.beta:g} s/B{inside}, computation {compute}"
    )


def choice_of(plan: Plan, network: NetworkModel) -> AlgorithmChoice | None:
    """The plan's all-reduce; None where it leaves the choice to alpha and beta, which a virtual network knows."""
    name = plan.topology.name
    if name in ("native", "auto", "server"):
        return None
    inner = int(plan.topology["inner"]) if name == "hierarchical" else network.ranks_per_host
    return AlgorithmChoice(cast(AlgorithmName, name), inner)


def _over_messages(plan: Plan) -> Plan:
    """The plan, its all-reduce left to the virtual group: there it advances while the rank computes."""
    return plan if plan.topology.name == "server" else replace(plan, topology=Choice("native"))


def _model_of(recipe: Recipe, splits: Splits, plan: Plan, seconds: float | None) -> ComputeModel:
    if seconds is not None:
        _, state = build_task(recipe, splits, seed=0)
        return spread_evenly(state.model.parameters, seconds)
    share = -(-recipe.mutable.batch_size // plan.num_ranks // recipe.mutable.accumulate)
    return measure_computation(recipe, splits, max(1, share))
