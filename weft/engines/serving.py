"""Workers and servers of a plan that trains through parameter servers: which process is which, and how they find each
other.

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
from weft.distributed.mailbox import AbstractMailbox, open_mailbox
from weft.engines.place import Place
from weft.specs import Plan, parse_plan
from weft.training.build import build_optimizer
from weft.training.optimizers import AbstractOptimizer
from weft.training.recipe import Recipe
from weft.training.replicas import AbstractReplicas

__all__ = ["Service", "join_service"]


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

    def spec(self, shard: int, charge: Callable[[AbstractOptimizer, float], AbstractOptimizer] | None = None) -> ServerSpec:
        """What one server needs to know.

        Args:
            charge: wraps the optimizer, given the shard's part of all elements, so that updates take virtual time.
        """
        plan = self.plan
        optimizer = build_optimizer(self.recipe)
        settings = settings_of(plan, optimizer)
        scripts = {seed: read_decisions(self.replay, seed, shard) for seed in self.seeds} if self.replay else None
        return ServerSpec(
            shard=shard,
            num_workers=plan.num_ranks,
            plan=str(plan),
            rate=settings.rate,
            form=settings.form,
            make_policy=lambda seed, is_fresh: (
                Script(scripts[seed]) if scripts else make_policy(plan.consistency, plan.num_ranks, is_fresh=is_fresh)
            ),
            make_optimizer=lambda fraction: charge(optimizer, fraction) if charge else optimizer,
            run=self.run,
            kept=self.kept / f"shard-{shard}.safetensors" if self.kept else None,
        )

    def worker(self, mailbox: AbstractMailbox) -> ServedReplicas:
        settings = settings_of(self.plan, build_optimizer(self.recipe), self.recipe.mutable.clip_norm)
        return ServedReplicas(mailbox, settings, self.seeds)


@contextmanager
def join_service(service: Service, place: Place) -> Iterator[AbstractReplicas | None]:
    """Be one of the processes of a run on this machine: yields the replicas of a worker, or None when a server is done.

    A worker that shares its process with a server serves in a thread until all workers have left.
    """
    plan = service.plan
    folder, num_workers = Path(place.meeting), plan.num_ranks
    known = range(num_workers + int(plan.topology["shards"]))
    kind = "shared_memory" if place.is_one_host else "tcp"

    def open_at(address: int) -> AbstractMailbox:
        return open_mailbox(kind, folder, address, known=known)

    if place.rank >= num_workers:
        _serve(open_at(place.rank), replace(service, kept=folder).spec(place.rank - num_workers))
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
