"""Training on the virtual cluster: the code that real ranks run, real mathematics, virtual time."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from weft.distributed.group.faulty import Fault
from weft.distributed.group.group import AbstractGroup
from weft.distributed.place.topology import algorithm_of
from weft.distributed.realise import RunSpec, realise
from weft.distributed.virtual import TEN_GIGABIT, TraceEvent, run_virtual
from weft.errors import PeerLostError, TrainingError, UsageError
from weft.planning.network import NetworkModel
from weft.records.record import RunRecord
from weft.records.record_file import write_record
from weft.records.run_folder import RunFolder
from weft.simulation.computation import ComputeModel, charge_task, spread_evenly
from weft.simulation.one_core import use_one_core
from weft.simulation.pace import Pace
from weft.simulation.place import TIMEOUT_SECONDS, VirtualPlace, with_host_servers
from weft.simulation.stragglers import Straggler, check_ranks, slowness
from weft.simulation.timing import measure_computation
from weft.specs import Plan, find_device
from weft.torch_private import use_determinism
from weft.training.build import build_splits, build_task, check_recipe
from weft.training.datasets import Splits
from weft.training.events import Listener
from weft.training.process import use_threads
from weft.training.recipe import Recipe
from weft.training.replicas import AbstractReplicas
from weft.training.run import mark_failed, run_recipe
from weft.training.surroundings import Surroundings

__all__ = ["Simulation", "simulate"]


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
    idle_shares: tuple[float, ...]  # of each rank's time in training, a mean over the seeds; nan of one that died
    trace: tuple[TraceEvent, ...] = ()

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
    stragglers: Sequence[Straggler] = (),
    faults: Sequence[Fault] = (),
    listeners: Sequence[Listener] = (),
    replay: Path | None = None,
    trace: bool = False,
) -> Simulation:
    """Run the recipe with its plan on virtual ranks of one thread each, and write the record.

    The same recipe, seed, network and compute model give the same record, times included.

    Args:
        compute: what a rank's computation costs, or the seconds of one step; measured here and now if not given.
        stragglers: what makes steps slower, drawn for each seed, rank and step.
        faults: what befalls ranks at which moment of virtual time.
        replay: a run folder, whose servers' decisions are repeated.
        trace: keep what every rank and its network side did when.

    Raises:
        PeerLostError: a rank was lost that its plan cannot do without, or that is a server too; the record says so.
    """
    check_recipe(recipe)
    plan = recipe.mutable.plan
    try:
        check_ranks(stragglers, plan.num_ranks)
        splits = build_splits(recipe)
        model = compute if isinstance(compute, ComputeModel) else _model_of(recipe, splits, plan, compute)
    except UsageError:  # nothing has begun, so nothing stays
        folder.discard()
        raise

    program = _RankProgram(
        recipe=recipe,
        splits=splits,
        seeds=seeds,
        network=network,
        compute=model,
        stragglers=stragglers,
        folder=folder,
        listeners=listeners,
        faults=faults,
        replay=replay,
    )
    began = time.perf_counter()
    # Ranks share the switches of the process: set here, they are found and left as they are by every rank.
    with use_determinism(), use_threads(1), use_one_core(), _use_failed_record(folder):
        result = run_virtual(
            program,
            plan.roles.num_addresses,
            network=with_host_servers(network, plan),
            choice=algorithm_of(plan),
            faults=faults,
            timeout=TIMEOUT_SECONDS,
            trace=trace,
            device=program.device,
        )
        if result.results[0] is None:
            raise PeerLostError("rank 0 is lost, and the result with it (rank: 0, it died); start again", 0)
    idle = [[math.nan] * len(seeds) if found is None else found[1] for found in result.results[: plan.num_ranks]]
    record = _with_idle(result.results[0][0], idle)
    write_record(folder.path, record)
    return Simulation(
        record=record,
        num_ranks=plan.num_ranks,
        network=network,
        compute=model,
        virtual_seconds=max(result.seconds),
        num_bytes=sum(result.bytes_sent),
        num_messages=result.num_messages,
        num_events=result.num_events,
        real_seconds=time.perf_counter() - began,
        idle_shares=tuple(fmean(shares) for shares in idle),
        trace=result.trace,
    )


@dataclass(frozen=True, kw_only=True)
class _RankProgram:
    """The program of every virtual rank: the recipe, at its own pace."""

    recipe: Recipe
    splits: Splits
    seeds: Sequence[int]
    network: NetworkModel
    compute: ComputeModel
    stragglers: Sequence[Straggler]
    folder: RunFolder
    listeners: Sequence[Listener]
    faults: Sequence[Fault] = ()
    replay: Path | None = None
    shared: dict[str, Any] = field(default_factory=dict)  # by all addresses, which are threads of one process

    @property
    def device(self) -> torch.device:
        """The one that all ranks share."""
        return find_device(self.recipe.mutable.device)

    def __call__(self, group: AbstractGroup) -> tuple[RunRecord, list[float]] | None:
        """The record, and of each training the share of its time that this rank was idle; None of a server."""
        pace = partial(slowness, self.stragglers, self.seeds[0], group.rank)
        place = VirtualPlace(group, self.faults, self.compute, self.shared, self.device, pace)
        spec = RunSpec.of(self.recipe, self.seeds, self.folder.path, self.replay)
        with realise(self.recipe.mutable.plan, place, spec) as replicas:
            return None if replicas is None else self._train(group, replicas)

    def _train(self, group: AbstractGroup, replicas: AbstractReplicas) -> tuple[RunRecord, list[float]]:
        pace = Pace(
            group.clock,
            lambda seed, step: slowness(self.stragglers, seed, group.rank, step),
            self.seeds,
            skips_rounds=self.recipe.mutable.plan.skips_rounds,
        )
        surroundings = Surroundings(
            now=group.clock.now,
            load=lambda _recipe: self.splits,
            prepare=lambda task: charge_task(task, self.compute, pace),
            listen=pace.listen,
            clock_rules=clock_rules(self.network, self.compute, self.stragglers),
            is_virtual=True,
            device=self.device,
        )
        record = run_recipe(
            self.recipe,
            folder=self.folder,
            seeds=self.seeds,
            listeners=self.listeners,
            replicas=replicas,
            surroundings=surroundings,
        )
        return record, pace.idle_shares


@contextmanager
def _use_failed_record(folder: RunFolder) -> Iterator[None]:
    """Whichever rank's error ends the run, the record says that it failed."""
    try:
        yield
    except TrainingError as error:
        mark_failed(folder, error)
        raise


def _with_idle(record: RunRecord, idle: Sequence[Sequence[float]]) -> RunRecord:
    """The record with the share of their time that ranks waited: the mean as a value, every rank's as a series, in
    which those that died are nan."""
    repetitions = []
    for repetition, shares in zip(record.repetitions, zip(*idle, strict=True), strict=True):
        values = {**repetition.values, "idle_share": fmean(share for share in shares if not math.isnan(share))}
        repetitions.append(replace(repetition, values=values, series={**repetition.series, "idle_share": shares}))
    return replace(record, repetitions=tuple(repetitions))


def clock_rules(network: NetworkModel, compute: ComputeModel, stragglers: Sequence[Straggler] = ()) -> str:
    """The meaning of the times of a simulated run, in words."""
    slow = f"; {', '.join(map(str, stragglers))}" if stragglers else ""
    inside = f" ({network.inside.alpha:g} s and {network.inside.beta:g} s/B inside a host)" if network.inside else ""
    return (
        "time is virtual and starts when the ranks do; nothing is saved on the way; a message takes "
        f"{network.between.alpha:g} s and {network.between.beta:g} s/B{inside}, computation {compute}{slow}"
    )


def _model_of(recipe: Recipe, splits: Splits, plan: Plan, seconds: float | None) -> ComputeModel:
    passes = recipe.mutable.accumulate * plan.num_micro_batches
    share = -(-recipe.mutable.batch_size // plan.num_replicas // passes)
    if seconds is not None:
        _, state = build_task(recipe, splits, seed=0)
        seconds /= plan.num_micro_batches
        model = spread_evenly(state.model.parameters, seconds)
        if plan.measured_every is None:
            return model
        # The time of an equal share: one that is smaller, as it was measured to be right, takes less.
        return replace(model, seconds_per_pass=0.0, seconds_per_sample=seconds / max(1, share))
    return measure_computation(recipe, splits, max(1, share))
