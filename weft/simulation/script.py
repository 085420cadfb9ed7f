"""A script on the virtual cluster, unchanged: every rank a thread with a main module of its own, in virtual time."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, final

from weft.distributed.group.faulty import Fault
from weft.distributed.group.group import AbstractGroup
from weft.distributed.place.topology import algorithm_of
from weft.distributed.script.observation.events import Observer, ScriptEnded
from weft.distributed.script.observation.supervision import Supervision, seed_generators
from weft.distributed.script.weaving.weaving import use_weavings
from weft.distributed.script.world.world import World, use_world
from weft.distributed.virtual import TEN_GIGABIT, VirtualResult, run_virtual
from weft.engines.failure import describe
from weft.errors import RankFailedError, UsageError, WeftError
from weft.planning.network import NetworkModel
from weft.simulation.computation import ComputeModel
from weft.simulation.one_core import use_one_core
from weft.simulation.pace import Pace
from weft.simulation.place import TIMEOUT_SECONDS, VirtualPlace, with_host_servers
from weft.simulation.script_process import ScriptCode, ScriptState, use_script_process
from weft.simulation.script_steps import OtherPlanError, StepCharges, StepTimes, Stopper, model_of
from weft.simulation.stragglers import Straggler, check_ranks, slowness
from weft.specs import Plan, parse_plan_for
from weft.training.process import use_threads
from weft.training.replicas import Traffic

__all__ = ["ScriptSimulation", "simulate_script"]

NUM_TIMED = 10
FREE = ComputeModel(0.0, 0.0, 0.0, {})


@dataclass(frozen=True)
class ScriptSimulation:
    """The costs of a script in virtual time. Steps are rank 0's updates; times of a step are medians."""

    plan: str
    num_ranks: int
    num_steps: int
    network: NetworkModel
    compute: ComputeModel | float
    virtual_seconds: float
    step_seconds: float
    compute_seconds: float  # of a pass and an update
    exposed_seconds: float  # of a step: rank 0 waited for others
    hidden_seconds: float  # of a step: messages were under way while rank 0 computed
    waiting_share: float  # of the time from weave to the end, a mean over ranks
    num_bytes: int  # sent, by all ranks together
    num_messages: int
    num_events: int
    digests: tuple[str, ...]  # of each rank's parameters in the end
    real_seconds: float


def simulate_script(
    path: Path,
    arguments: Sequence[str] = (),
    *,
    num_ranks: int,
    plan: Plan | None = None,
    network: NetworkModel = TEN_GIGABIT,
    compute: ComputeModel | float | None = None,
    stragglers: Sequence[Straggler] = (),
    faults: Sequence[Fault] = (),
    seed: int | None = None,
    replay: Path | None = None,
) -> ScriptSimulation:
    """Run a script on virtual ranks.

    The same script, plan, network and compute model give the same result, times included.

    Args:
        arguments: what the script gets.
        num_ranks: of the script's own plan.
        plan: goes before it.
        compute: what a rank's passes cost, or the seconds of one; if not given, some steps of the script are timed on
            this machine first, with a rank's share of each batch.
        stragglers: what makes steps slower, drawn for each rank and step.
        faults: what befalls ranks at which moment of virtual time.
        seed: of all generators when the script begins; by default they are as they are here.
        replay: the folder of a run, whose decisions are repeated.

    Raises:
        UsageError: the script never wove anything, or left with an exit code.
    """
    check_ranks(stragglers, num_ranks)
    began = time.perf_counter()
    with use_script_process(path, arguments) as nowhere, use_threads(1), use_one_core():
        program = _Program(ScriptCode(path), nowhere, stragglers, faults, seed, replay)
        model = program.time_steps(num_ranks) if compute is None else compute
        chosen = plan or parse_plan_for("data", num_ranks)
        try:
            result = program.run(chosen, model, network, is_given=plan is not None)
        except OtherPlanError as other:  # the script has just begun
            chosen = parse_plan_for(other.plan, num_ranks)
            result = program.run(chosen, model, network, is_given=True)
    return _report(chosen, network, model, result, time.perf_counter() - began)


def _report(
    plan: Plan, network: NetworkModel, model: ComputeModel | float, result: VirtualResult, real_seconds: float
) -> ScriptSimulation:
    found = [report for report in result.results[: plan.num_ranks] if report is not None]
    first = found[0] if found else None
    if first is None or not first.digest:
        raise UsageError("script never wove a model, so its ranks share nothing; call weft.weave in it")
    exposed, hidden = [one.exposed for one in first.traffic], [one.hidden for one in first.traffic]
    steps = [end - start for start, end in zip([first.began, *first.ends], first.ends, strict=False)]
    return ScriptSimulation(
        plan=str(plan),
        num_ranks=plan.num_ranks,
        num_steps=len(first.ends),
        network=network,
        compute=model,
        virtual_seconds=max(result.seconds),
        step_seconds=median(steps or [0.0]),
        compute_seconds=model if isinstance(model, float) else model.seconds_per_pass + model.seconds_per_update,
        exposed_seconds=median(exposed or [0.0]),
        hidden_seconds=median(hidden or [0.0]),
        waiting_share=fmean(report.idle_share for report in found),
        num_bytes=sum(result.bytes_sent),
        num_messages=result.num_messages,
        num_events=result.num_events,
        digests=tuple(report.digest for report in found),
        real_seconds=real_seconds,
    )


@dataclass(frozen=True)
class _Report:
    """The end of one rank."""

    began: float
    ends: list[float]
    traffic: list[Traffic]
    idle_share: float
    digest: str


@final
@dataclass(frozen=True)
class _Program:
    """The script as a program of virtual ranks."""

    code: ScriptCode
    nowhere: Any
    stragglers: Sequence[Straggler]
    faults: Sequence[Fault]
    seed: int | None
    replay: Path | None

    def run(self, plan: Plan, model: ComputeModel | float, network: NetworkModel, *, is_given: bool) -> VirtualResult:
        """The cluster of a plan, which is given to the script, or expected of it."""
        compute = model if isinstance(model, ComputeModel) else FREE
        shared: dict[str, Any] = {}

        def program(group: AbstractGroup) -> _Report | None:
            pace = Pace(
                group.clock,
                lambda seed, step: slowness(self.stragglers, seed, group.rank, step),
                (),
                skips_rounds=plan.skips_rounds,
            )
            charges = StepCharges(model, pace, str(plan))
            world = World(
                VirtualPlace(
                    group, self.faults, compute, shared, slowness=partial(slowness, self.stragglers, 0, group.rank)
                ),
                plan if is_given else None,
                Supervision((charges,), replay=self.replay),
            )
            self._be_rank(world)
            idle = pace.idle_shares[0] if pace.idle_shares else 0.0
            return _Report(charges.began, charges.ends, charges.traffic, idle, charges.digest)

        return self._run(program, plan, network, self.faults)

    def time_steps(self, num_ranks: int) -> ComputeModel:
        """Some steps with synchronous ranks, which do not wait in the middle of a pass; rank 0's are timed."""
        plan, times, shared = parse_plan_for("data", num_ranks), StepTimes(), dict[str, Any]()

        def program(group: AbstractGroup) -> None:
            observers: tuple[Observer, ...] = (*((times,) if group.rank == 0 else ()), Stopper(NUM_TIMED))
            supervision = Supervision(observers, is_silent=True)
            self._be_rank(World(VirtualPlace(group, (), FREE, shared), plan, supervision))

        self._run(program, plan, TEN_GIGABIT, ())
        return model_of(times.passes)

    def _run(
        self, program: Callable[[AbstractGroup], Any], plan: Plan, network: NetworkModel, faults: Sequence[Fault]
    ) -> VirtualResult:
        return run_virtual(
            program,
            plan.roles.num_addresses,
            network=with_host_servers(network, plan),
            choice=algorithm_of(plan),
            faults=faults,
            timeout=TIMEOUT_SECONDS,
            state=ScriptState(),
        )

    def _be_rank(self, world: World) -> None:
        if self.seed is not None:
            seed_generators(self.seed)
        with use_world(world), _use_told_failure(world.rank, world.num_ranks), use_weavings(world):
            self.code.run(world.rank, world.num_ranks, self.nowhere, is_silent=world.supervision.is_silent)
            if not world.is_server:
                world.supervision.tell(ScriptEnded())


@contextmanager
def _use_told_failure(rank: int, num_ranks: int) -> Iterator[None]:
    """An error of the script is told as that of a rank that is a process."""
    try:
        yield
    except WeftError:
        raise
    except SystemExit as left:
        raise UsageError(f"script left with an exit code (rank: {rank}, code: {left.code}); see what it said") from None
    except Exception as error:
        failure = describe(error, rank)
        text = f"rank {rank} of {num_ranks}: {failure.text}"
        raise RankFailedError(text, rank, failure.traceback, failure.exit_code, failure.shown) from error
