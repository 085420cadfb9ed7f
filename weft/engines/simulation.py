"""Training on the virtual cluster: the code that real ranks run, real mathematics, virtual time."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import NoReturn, cast

from weft.distributed.collectives import AlgorithmChoice, AlgorithmName
from weft.distributed.group.clock import AbstractClock
from weft.distributed.group.faulty import Fault, Kill
from weft.distributed.group.group import AbstractGroup
from weft.distributed.mailbox import AbstractMailbox, FaultyMailbox, VirtualMailbox
from weft.distributed.placement import carry_out
from weft.distributed.virtual import TEN_GIGABIT, TraceEvent, die, run_virtual
from weft.engines.computation import ChargingOptimizer, ComputeModel, charge_task, spread_evenly
from weft.engines.one_core import use_one_core
from weft.engines.pace import Pace
from weft.engines.pairing import Pairing
from weft.engines.proving import use_threads
from weft.engines.serving import Service, process_of, tolerance_of
from weft.engines.stragglers import Straggler, check_ranks, slowness
from weft.engines.timing import measure_computation
from weft.errors import PeerLostError, TrainingError, UsageError
from weft.metrics.record import RunRecord
from weft.metrics.record_file import write_record
from weft.metrics.run_folder import RunFolder
from weft.planning.network import NetworkModel
from weft.specs import Plan, parse_plan
from weft.specs.plan import Choice
from weft.torch_private import use_determinism
from weft.training.build import build_splits, build_task, check_recipe
from weft.training.datasets import Splits
from weft.training.events import Listener
from weft.training.optimizers import AbstractOptimizer
from weft.training.recipe import Recipe
from weft.training.replicas import AbstractReplicas
from weft.training.run import mark_failed, run_recipe
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
    plan = parse_plan(recipe.mutable.plan)
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
            plan.num_addresses,
            network=with_host_servers(network, plan),
            choice=choice_of(plan, network),
            faults=faults,
            timeout=TIMEOUT_SECONDS,
            trace=trace,
        )
        if result.results[0] is None:
            raise PeerLostError("rank 0 is lost, and the result with it (rank: 0, it died); start again", 0)
    died = [math.nan] * len(seeds)
    idle = [died if found is None else found[1] for found in result.results[: plan.num_ranks]]
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
    """What every virtual rank runs: the recipe, at its own pace."""

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

    @cached_property
    def pairing(self) -> Pairing:
        """Shared by workers and desks of a plan that averages in pairs."""
        return Service(self.recipe, tuple(self.seeds), self.folder.path, self.replay).pairing(TIMEOUT_SECONDS)

    def __call__(self, group: AbstractGroup) -> tuple[RunRecord, list[float]] | None:
        """The record, and of each training the share of its time that this rank was idle; None of a server."""
        plan = parse_plan(self.recipe.mutable.plan)
        if plan.is_mailed:
            return self._pair(group, plan.num_ranks)
        if not plan.is_served:
            return self._train(group, carry_out(_over_messages(plan), group, buffers=self.recipe.mutable.buffers))
        service = Service(self.recipe, tuple(self.seeds), run=self.folder.path, replay=self.replay)
        mailbox = self._mortal(VirtualMailbox(group), plan)
        if group.rank < plan.num_ranks:
            return self._train(group, service.worker(mailbox))
        service.server(group.rank - plan.num_ranks, partial(self._charge, group.clock))(mailbox)
        return None

    def _mortal(self, mailbox: AbstractMailbox, plan: Plan) -> AbstractMailbox:
        """The mailbox of a worker, or of a server, which dies with the process that it shares."""
        process, tolerance = process_of(plan, mailbox.address), tolerance_of(plan)
        deaths = [fault for fault in self.faults if fault.rank == process and isinstance(fault, Kill)]
        own = self.faults if process == mailbox.address else [replace(death, rank=mailbox.address) for death in deaths]
        is_survived = process in tolerance.expendable | tolerance.restored
        end = die if is_survived else partial(_end_run, process, plan.roles[process])
        return FaultyMailbox(mailbox, own, die=end)

    def _pair(self, group: AbstractGroup, size: int) -> tuple[RunRecord, list[float]] | None:
        """A worker, or the desk of one, which dies with it."""
        own = [replace(fault, rank=group.rank) for fault in self.faults if fault.rank == group.rank % size]
        mailbox = FaultyMailbox(VirtualMailbox(group), own, die=die)
        if group.rank >= size:
            self.pairing.keep_desk(mailbox)
            return None
        replicas = self.pairing.worker(mailbox)
        result = self._train(group, replicas)
        replicas.depart()
        return result

    def _charge(self, clock: AbstractClock, optimizer: AbstractOptimizer, fraction: float) -> AbstractOptimizer:
        """A server's updates take their time too."""
        seconds = self.compute.seconds_per_update * fraction
        return ChargingOptimizer(optimizer, replace(self.compute, seconds_per_update=seconds), clock)

    def _train(self, group: AbstractGroup, replicas: AbstractReplicas) -> tuple[RunRecord, list[float]]:
        pace = Pace(
            group.clock,
            lambda seed, step: slowness(self.stragglers, seed, group.rank, step),
            self.seeds,
            skips_rounds=parse_plan(self.recipe.mutable.plan).consistency.name == "backup",
        )
        surroundings = Surroundings(
            now=group.clock.now,
            load=lambda _recipe: self.splits,
            prepare=lambda task: charge_task(task, self.compute, pace),
            listen=pace.listen,
            clock_rules=clock_rules(self.network, self.compute, self.stragglers),
            is_virtual=True,
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


def _end_run(rank: int, role: str) -> NoReturn:
    """What is done by whoever started the processes, when one dies that no other can stand in for."""
    raise PeerLostError(f"rank {rank} is lost, and the run with it (rank {rank} was {role}); start again", rank)


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
    """What the times of a simulated run mean, in words."""
    slow = f"; {', '.join(map(str, stragglers))}" if stragglers else ""
    inside = f" ({network.inside.alpha:g} s and {network.inside.beta:g} s/B inside a host)" if network.inside else ""
    return (
        "time is virtual and starts when the ranks do; nothing is saved on the way; a message takes "
        f"{network.between.alpha:g} s and {network.between.beta:g} s/B{inside}, computation {compute}{slow}"
    )


def with_host_servers(network: NetworkModel, plan: Plan) -> NetworkModel:
    """The network, with every host server on the host of its first worker."""
    first, inner = plan.num_addresses - plan.num_hosts, int(dict(plan.topology.parameters).get("inner", 1))
    if not network.ranks_per_host:
        return network
    guests = tuple((first + number, network.host_of(number * inner)) for number in range(plan.num_hosts))
    return replace(network, guests=guests)


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
