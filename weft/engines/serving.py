"""Workers and servers of a plan: which process is which, and how they find each other.

data=2 consistency=async topology=server(shards=2)            process 0: worker 0, shard 0     in two threads
                                                              process 1: worker 1, shard 1
data=2 consistency=async topology=server(2,place=own)         process 0, 1: workers     process 2, 3: shards
data=4 consistency=async topology=server(1,inner=2)           process 0: worker 0, shard 0, host server 0
                                                              process 2: worker 2, host server 1
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from weft.distributed.consistency.server import (
    HostSpec,
    Joins,
    ServedReplicas,
    ServerSpec,
    Summary,
    make_policy,
    read_decisions,
    serve,
    serve_host,
    settings_of,
)
from weft.distributed.consistency.server.decisions import Decision
from weft.distributed.consistency.server.script import Script
from weft.distributed.mailbox import AbstractMailbox
from weft.distributed.placement import carry_out
from weft.engines.beside import run_beside
from weft.engines.local import STRICT, Tolerance
from weft.engines.meeting import meet
from weft.engines.pairing import Pairing, use_paired
from weft.engines.place import Place
from weft.engines.post import join_post
from weft.engines.rank_program import mark_joined
from weft.errors import PlanError, TrainingError, UsageError
from weft.specs import Plan, parse_plan
from weft.training.build import build_optimizer
from weft.training.optimizers import SGD, AbstractOptimizer, Optimizer
from weft.training.recipe import Recipe
from weft.training.replicas import AbstractReplicas

__all__ = ["Service", "check_restarts", "process_of", "tolerance_of", "use_replicas"]


Charge = Callable[[AbstractOptimizer, float], AbstractOptimizer]
"""Wraps an optimizer, given the shard's part of all elements, so that updates take virtual time."""

Server = Callable[[AbstractMailbox], Summary]
"""Serves until all workers have left."""


@dataclass(frozen=True)
class Service:
    """What the servers of a run serve.

    Args:
        run: the run folder, where they record what they decide.
        replay: the run folder whose decisions they repeat; None to decide for themselves.
        kept: a folder for snapshots, from which a server that died is restored; None for none.
    """

    recipe: Recipe
    seeds: tuple[int, ...]
    run: Path | None = None
    replay: Path | None = None
    kept: Path | None = None

    @property
    def plan(self) -> Plan:
        return parse_plan(self.recipe.mutable.plan)

    def spec(self, shard: int, charge: Charge | None = None) -> ServerSpec:
        """What one server needs to know.

        Args:
            charge: wraps the optimizer, given the shard's part of all elements, so that updates take virtual time.
        """
        plan = self.plan
        optimizer = build_optimizer(self.recipe)
        settings = settings_of(plan, optimizer)
        # Where ranks update by themselves, servers need no optimizer, and keep no state of one.
        updater = optimizer if settings.form == "gradient" else Optimizer(SGD(), lr=optimizer.lr)
        scripts = {seed: read_decisions(self.replay, seed, shard) for seed in self.seeds} if self.replay else None
        return ServerSpec(
            shard=shard,
            num_workers=plan.num_ranks,
            plan=str(plan),
            rate=settings.rate,
            form=settings.form,
            alpha=settings.alpha,
            num_shards=settings.num_shards,
            inner=settings.inner,
            make_policy=lambda seed, is_fresh: (
                _repeat(scripts[seed], is_fresh=is_fresh)
                if scripts
                else make_policy(plan.consistency, plan.num_ranks, is_fresh=is_fresh)
            ),
            make_optimizer=lambda fraction: charge(updater, fraction) if charge else updater,
            run=self.run,
            kept=self.kept / f"shard-{shard}.safetensors" if self.kept else None,
        )

    def pairing(self, patience: float = 3600.0) -> Pairing:
        """Of a plan whose ranks average in pairs, and need no servers."""
        return Pairing(self.plan, self.seeds, self.run, self.replay, patience)

    def host_spec(self, host: int) -> HostSpec:
        """What one host server needs to know."""
        plan, replay = self.plan, self.replay
        scripts = {seed: read_decisions(replay, seed, host, "host") for seed in self.seeds} if replay else None
        return HostSpec(
            host=host,
            num_workers=plan.num_ranks,
            num_shards=int(plan.topology["shards"]),
            inner=int(plan.topology["inner"]),
            plan=str(plan),
            make_joins=lambda seed: Joins(scripts[seed]) if scripts else Joins(),
            run=self.run,
            kept=self.kept / f"host-{host}.begun" if self.kept else None,
        )

    def server(self, number: int, charge: Charge | None = None) -> Server:
        """What the server of this number does with its mailbox: the shards come first, then the host servers."""
        num_shards = int(self.plan.topology["shards"])
        if number < num_shards:
            return partial(serve, spec=self.spec(number, charge))
        return partial(serve_host, spec=self.host_spec(number - num_shards))

    def worker(self, mailbox: AbstractMailbox, on_joined: Callable[[], None] = lambda: None) -> ServedReplicas:
        """Args:
        on_joined: called when all servers know the worker.
        """
        settings = settings_of(self.plan, build_optimizer(self.recipe), self.recipe.mutable.clip_norm)
        return ServedReplicas(mailbox, settings, self.seeds, on_joined)


def _repeat(decisions: Iterable[Decision], *, is_fresh: bool) -> Script:
    if not is_fresh:  # its workers are not where the record begins
        raise TrainingError("server was lost in a replay, which cannot go on from a snapshot; start the replay again")
    return Script(decisions)


def tolerance_of(plan: Plan, restarts: int = 0) -> Tolerance:
    """Which processes a run can lose: workers other than rank 0, which keeps the record, unless they are servers too;
    and servers of their own, which are restored.

    Args:
        restarts: how often workers that were lost are started again, in all.
    """
    if plan.is_mailed:
        return Tolerance(frozenset(range(1, plan.num_ranks)))
    if not plan.is_served:
        return STRICT
    roles = dict(enumerate(plan.roles))
    workers = {rank for rank, role in roles.items() if role == "worker" and rank > 0}
    servers = range(plan.num_ranks, plan.num_processes)
    return Tolerance(frozenset(workers), frozenset(servers), most_returns=restarts)


def check_restarts(plan: Plan, num_seeds: int) -> None:
    """Raise UsageError where no worker that was lost can be taken back."""
    # A host server may still hold a gradient of the life before, which the shards would take for one of the new.
    if not plan.is_served or plan.num_hosts or not tolerance_of(plan).expendable:
        cure = "use servers without inner, and more ranks than shards or place=own"
        raise UsageError(f"plan has no worker that can be started again ({plan}); leave --restarts out, or {cure}")
    if num_seeds > 1:
        raise UsageError(f"workers are started again in a run of one seed (seeds: {num_seeds}); leave --repeat out")


def process_of(plan: Plan, address: int) -> int:
    """The process that a worker or server is in: one of its own, or that of the rank which a server shares.

    >>> [process_of(parse_plan("data=2 consistency=async topology=server(shards=2)"), address) for address in range(4)]
    [0, 1, 0, 1]
    """
    number = address - plan.num_ranks
    return next((rank for rank in range(plan.num_ranks) if number in _servers_of(plan, rank)), address)


@contextmanager
def use_replicas(service: Service, place: Place) -> Iterator[AbstractReplicas | None]:
    """Be one of the processes of a run: yields the replicas of its plan, or None when a server has done its part."""
    plan = service.plan
    if plan.is_served:
        with _use_served(service, place) as served:
            yield served
        return
    if plan.is_mailed:
        with use_paired(service.pairing(), place) as paired:
            yield paired
        return
    group = meet(place)
    try:
        yield carry_out(plan, group, buffers=service.recipe.mutable.buffers)
    finally:
        group.close()


@contextmanager
def _use_served(service: Service, place: Place) -> Iterator[AbstractReplicas | None]:
    """A worker that shares its process with a server serves in a thread until all workers have left."""
    plan = service.plan
    num_workers = plan.num_ranks
    if place.size != plan.num_processes:
        numbers = f"plan: {plan.num_processes}, started: {place.size}"
        raise PlanError(f"plan needs another number of processes than there are ({numbers}); start as many")
    known = range(plan.num_addresses)

    def open_at(address: int) -> AbstractMailbox:
        return join_post(place, address=address, known=known)

    if place.rank >= num_workers:
        kept = Path(place.meeting) if place.starter == "weft" else None
        _serve(open_at(place.rank), replace(service, kept=kept).server(place.rank - num_workers))
        yield None
        return
    beside = _servers_of(plan, place.rank)
    with _use_servers([(open_at(num_workers + number), service.server(number)) for number in beside]):
        mailbox = open_at(place.rank)
        try:
            yield service.worker(mailbox, partial(mark_joined, place))
        finally:
            mailbox.close()


def _servers_of(plan: Plan, rank: int) -> list[int]:
    """The servers that share the process of a rank: a shard, and a host server if the rank is the first of its host."""
    if plan.num_processes > plan.num_ranks:
        return []
    shards, inner = int(plan.topology["shards"]), int(plan.topology["inner"])
    hosts = [shards + rank // inner] if plan.num_hosts and rank % inner == 0 else []
    return [*([rank] if rank < shards else []), *hosts]


def _serve(mailbox: AbstractMailbox, server: Server) -> None:
    try:
        server(mailbox)
    finally:
        mailbox.close()


@contextmanager
def _use_servers(servers: Sequence[tuple[AbstractMailbox, Server]]) -> Iterator[None]:
    """Serve in threads, to the end if the block ends well."""

    def dismiss() -> None:
        for mailbox, _ in servers:
            mailbox.close()

    bodies = {f"server {mailbox.address}": partial(_serve, mailbox, server) for mailbox, server in servers}
    with run_beside(bodies, dismiss):
        yield
