"""Workers and servers of a plan: which process is which, and how they find each other.

data=2 consistency=async topology=server(shards=2)            process 0: worker 0, shard 0     in two threads
                                                              process 1: worker 1, shard 1
data=2 consistency=async topology=server(2,place=own)         process 0, 1: workers     process 2, 3: shards
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from weft.distributed.consistency.server import (
    ServedReplicas,
    ServerSpec,
    make_policy,
    read_decisions,
    serve,
    server_address,
    settings_of,
)
from weft.distributed.consistency.server.script import Script
from weft.distributed.mailbox import AbstractMailbox
from weft.distributed.placement import carry_out
from weft.engines.local import STRICT, Tolerance
from weft.engines.meeting import meet
from weft.engines.place import Place
from weft.engines.post import join_post
from weft.errors import PlanError
from weft.specs import Plan, parse_plan
from weft.training.build import build_optimizer
from weft.training.optimizers import SGD, AbstractOptimizer, Optimizer
from weft.training.recipe import Recipe
from weft.training.replicas import AbstractReplicas

__all__ = ["Service", "tolerance_of", "use_replicas"]


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

    def spec(
        self, shard: int, charge: Callable[[AbstractOptimizer, float], AbstractOptimizer] | None = None
    ) -> ServerSpec:
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
            make_policy=lambda seed, is_fresh: (
                Script(scripts[seed]) if scripts else make_policy(plan.consistency, plan.num_ranks, is_fresh=is_fresh)
            ),
            make_optimizer=lambda fraction: charge(updater, fraction) if charge else updater,
            run=self.run,
            kept=self.kept / f"shard-{shard}.safetensors" if self.kept else None,
        )

    def worker(self, mailbox: AbstractMailbox) -> ServedReplicas:
        settings = settings_of(self.plan, build_optimizer(self.recipe), self.recipe.mutable.clip_norm)
        return ServedReplicas(mailbox, settings, self.seeds)


def tolerance_of(plan: Plan) -> Tolerance:
    """Which processes a run can lose: workers other than rank 0, which keeps the record, unless they hold a shard; and
    servers of their own, which are restored."""
    if not plan.is_served:
        return STRICT
    holders = int(plan.topology["shards"]) if plan.num_processes == plan.num_ranks else 1
    workers, servers = range(holders, plan.num_ranks), range(plan.num_ranks, plan.num_processes)
    return Tolerance(frozenset(workers), frozenset(servers))


@contextmanager
def use_replicas(service: Service, place: Place) -> Iterator[AbstractReplicas | None]:
    """Be one of the processes of a run: yields the replicas of its plan, or None when a server has done its part."""
    plan = service.plan
    if plan.is_served:
        with _use_served(service, place) as served:
            yield served
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
    known = range(num_workers + int(plan.topology["shards"]))

    def open_at(address: int) -> AbstractMailbox:
        return join_post(place, address=address, known=known)

    if place.rank >= num_workers:
        kept = Path(place.meeting) if place.starter == "weft" else None
        _serve(open_at(place.rank), replace(service, kept=kept).spec(place.rank - num_workers))
        yield None
        return
    shards = [place.rank] if plan.num_processes == num_workers and place.rank < int(plan.topology["shards"]) else []
    with _use_servers([(open_at(server_address(num_workers, shard)), service.spec(shard)) for shard in shards]):
        mailbox = open_at(place.rank)
        try:
            yield service.worker(mailbox)
        finally:
            mailbox.close()


def _serve(mailbox: AbstractMailbox, spec: ServerSpec) -> None:
    try:
        serve(mailbox, spec)
    finally:
        mailbox.close()


@contextmanager
def _use_servers(servers: Sequence[tuple[AbstractMailbox, ServerSpec]]) -> Iterator[None]:
    """Serve in threads, to the end if the block ends well; the first error of a server is raised."""
    errors: list[Exception] = []

    def body(mailbox: AbstractMailbox, spec: ServerSpec) -> None:
        try:
            _serve(mailbox, spec)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=server, name=f"server {server[1].shard}") for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield
    except BaseException:
        for mailbox, _ in servers:
            mailbox.close()
        raise
    finally:
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
