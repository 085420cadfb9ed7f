"""Ranks that meet at servers, each at its own pace: which process serves, and in which thread.

data=2 consistency=async topology=server(shards=2)            process 0: worker 0, server 0     in two threads
                                                              process 1: worker 1, server 1
data=2 consistency=async topology=server(2,place=own)         process 0, 1: workers     process 2, 3: servers

On the virtual cluster every worker and every server is a process of its own.

Where ranks hold a model in parts, every part has servers of its own, which know the workers of that part alone, by the
numbers of their replicas:

data=2 pipeline=2 consistency=async topology=server(1)        stage 0: workers 0, 1 and server 0 (address 4)
                                                              stage 1: workers 2, 3 and server 1 (address 5)
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from weft.distributed.channels.addresses import use_addresses
from weft.distributed.channels.run_spec import RunSpec
from weft.distributed.channels.share_log import measured_shares
from weft.distributed.channels.stage_log import stage_log
from weft.distributed.codecs import make_codec
from weft.distributed.consistency.server import (
    HostSpec,
    JoinPolicy,
    ReplayPolicy,
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
from weft.distributed.consistency.server.policy import AbstractPolicy
from weft.distributed.mailbox import AbstractMailbox, PartMailbox
from weft.distributed.place import AbstractPlace
from weft.distributed.placement import MeshGroups
from weft.distributed.placement.choice import inside_of, open_groups
from weft.distributed.placement.choice import place as choose_placement
from weft.distributed.placement.rules import Rules
from weft.errors import TrainingError
from weft.specs import Plan
from weft.training.optimizers import SGD, AbstractOptimizer, Optimizer
from weft.training.placement import AbstractPlacement
from weft.training.replicas import AbstractReplicas

__all__ = ["use_servers"]

Server = Callable[[AbstractMailbox], Summary]
"""Serves until all workers have left."""


@contextmanager
def use_servers(plan: Plan, place: AbstractPlace, spec: RunSpec) -> Iterator[AbstractReplicas | None]:
    """Be one of the processes: its worker, with servers beside it in threads until all workers have left, or a server
    and nothing else."""
    # One that shares a worker's process ends the run with it; nobody would start it again.
    is_restored = len(place.addresses(plan)) == 1 and bool(plan.roles.restored)

    def serve_at(mailbox: AbstractMailbox) -> Callable[[], object]:
        part = (mailbox.address - plan.num_ranks) // max(1, plan.num_shards)
        server = _server_at(mailbox.address, plan, place, spec, is_restored=is_restored)
        return partial(server, _part_of(mailbox, plan, part))

    with ExitStack() as opened:
        groups = _open_groups(plan, place, opened) if plan.splits_model else None
        own = opened.enter_context(use_addresses(plan, place, serve_at))
        if own is None:
            yield None
            return
        settings = settings_of(plan, _optimizer_of(spec), spec.clip_norm)
        mesh, placement = plan.mesh(own.address), _placement_of(groups, plan, place, spec) if groups else None
        yield ServedReplicas(
            _part_of(own, plan, mesh.part),
            settings,
            spec.seeds,
            place.mark_joined,
            buffers=spec.buffers,
            shares=measured_shares(plan, mesh, own.clock, spec),
            mesh=mesh,
            inside=inside_of(groups, plan, placement) if groups and placement else None,
        )


def _open_groups(plan: Plan, place: AbstractPlace, opened: ExitStack) -> MeshGroups | None:
    """Of ranks that hold models in parts; None in a process that is no rank. A collective call."""
    world = place.open_ranks(plan)
    if world is None:
        return None
    opened.callback(world.close)
    groups = MeshGroups(world, plan.mesh(world.rank))
    opened.callback(groups.close)
    return groups


def _placement_of(groups: MeshGroups, plan: Plan, place: AbstractPlace, spec: RunSpec) -> AbstractPlacement:
    """A collective call."""
    open_groups(groups)
    codec, rules = make_codec(plan.compress, rank=groups.mesh.replica), Rules(spec.rules)
    of_stages = {"times": place.times, "log": stage_log(plan, groups.mesh, spec)}
    placement, _ = choose_placement(groups, plan, codec, whole_gradients=True, rules=rules, of_stages=of_stages)
    return placement


def _part_of(mailbox: AbstractMailbox, plan: Plan, part: int) -> AbstractMailbox:
    """The mailbox among the workers and servers of a part of the model."""
    if not plan.splits_model:
        return mailbox
    first = plan.num_ranks + part * plan.num_shards
    return PartMailbox(mailbox, [*plan.mesh(0).holders_of(part), *range(first, first + plan.num_shards)])


def _server_at(address: int, plan: Plan, place: AbstractPlace, spec: RunSpec, *, is_restored: bool = False) -> Server:
    """The server of an address: the shards come first, then the host servers.

    Args:
        is_restored: whether one that dies is started again, and goes on from its snapshot.
    """
    kinds = plan.roles.kinds
    number = address - kinds.index(kinds[address])
    folder = place.snapshots if is_restored else None
    if kinds[address] == "host server":
        begun = folder / f"host-{number}.begun" if folder else None
        return partial(serve_host, spec=_host_spec(number, plan, spec, begun))
    snapshot = folder / f"shard-{number}.safetensors" if folder else None
    return partial(serve, spec=_server_spec(number, plan, place, spec, snapshot))


def _server_spec(shard: int, plan: Plan, place: AbstractPlace, spec: RunSpec, snapshot: Path | None) -> ServerSpec:
    """The specification of one server: a shard of the model, or of a part of it.

    Args:
        shard: its number among all servers of the plan.
    """
    optimizer = _optimizer_of(spec)
    settings = settings_of(plan, optimizer, spec.clip_norm)
    # Where ranks update by themselves, servers need no optimizer, and keep no state of one.
    updater = optimizer if settings.form == "gradient" else Optimizer(SGD(), lr=optimizer.lr)
    tuned = spec.make_updates(shard, settings) if spec.make_updates and settings.form == "gradient" else None
    replay = None if settings.is_synchronous else spec.replay
    recorded = {seed: read_decisions(replay, seed, shard) for seed in spec.seeds} if replay else None

    def policy_for(seed: int, is_fresh: bool) -> AbstractPolicy:
        if recorded is not None:
            return _repeat(recorded[seed], is_fresh=is_fresh)
        return make_policy(plan.consistency, plan.num_replicas, is_fresh=is_fresh)

    return ServerSpec(
        shard=shard,
        plan=str(plan),
        settings=settings,
        make_policy=policy_for,
        make_optimizer=partial(place.charge_updates, updater if tuned is None else tuned),
        tune=None if tuned is None else tuned.tune,
        run=None if settings.is_synchronous else spec.run,  # whose updates depend on nothing that is decided
        snapshot=snapshot,
    )


def _host_spec(host: int, plan: Plan, spec: RunSpec, begun: Path | None) -> HostSpec:
    """The specification of one host server."""
    replay = spec.replay
    recorded = {seed: read_decisions(replay, seed, host, "host") for seed in spec.seeds} if replay else None
    return HostSpec(
        host=host,
        plan=str(plan),
        settings=settings_of(plan, _optimizer_of(spec)),
        make_policy=lambda seed: JoinPolicy(recorded[seed]) if recorded else JoinPolicy(),
        run=spec.run,
        begun=begun,
    )


def _repeat(decisions: Iterable[Decision], *, is_fresh: bool) -> ReplayPolicy:
    if not is_fresh:  # its workers are not where the record begins
        raise TrainingError("server was lost in a replay, which cannot go on from a snapshot; start the replay again")
    return ReplayPolicy(decisions)


def _optimizer_of(spec: RunSpec) -> AbstractOptimizer:
    assert spec.optimizer is not None, "servers update in the place of ranks"
    return spec.optimizer
