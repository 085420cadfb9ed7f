"""The equations of updates through servers, followed in one process in the order that the shards recorded.

    shard 0   r0 g00 r1 r0 g11 ...     r: a rank is sent the weights; g: the gradient of a rank's step is an update
    shard 1   r0 r1 g11 g00 r0 ...     a rank that all shards have sent weights takes a step with these

    by arrival      w <- U(w, g, c lr)             c: the share s of the batch, 1 / staleness, or 1
    joined          g = sum s_i g_i / sum s_i,     as one gradient, with the sum of the shares, as old as its oldest
    rounds          w <- U(w, sum s_r g_r, lr)     shares of those that are there, made to sum to 1
    differences     w <- w + c d                   d: by how much the rank's own optimizer changed its weights
    in parts        g = sum s_i g_i / s            s: the mean of the shares of the steps since the shard's last turn

With a codec what is pushed is q(g), what is joined q(mean of q(g_i)), and a rank computes at q(w).

U is the plain optimizer. Of each shard there is a model of whole tensors, updated in the shard's order, in which only
the elements count that the shard holds. No shards, policies, messages or settings: only the plan and the records.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from weft.distributed.consistency.server.decisions import Commit, Decision, Drop, Push, Release
from weft.errors import CorruptFileError
from weft.proving.held import Elements
from weft.proving.proof import clone
from weft.proving.reference import Replica
from weft.proving.relaxed_equations import Weights
from weft.proving.rounding import round_all, rounding_of
from weft.specs import Plan
from weft.training.gradients import clip_by_norm
from weft.training.optimizers import AbstractOptimizer, OptimizerState
from weft.training.replicas import Update

__all__ = ["Compute", "Computed", "Setup", "follow_gradients"]

Gradients = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Computed:
    """The result of a rank on a share of a batch: the mean gradient, the share that it is, the learning rate there."""

    gradients: Gradients
    share: float
    lr: float


Compute = Callable[[Replica, int, int], Computed]
"""At a replica's weights, of a global batch and the number of a share of it."""


@dataclass(frozen=True)
class Setup:
    """The model, its optimizers, its cuts and the ranks as they begin.

    Args:
        make_optimizer: a new one for each shard and rank, as some keep their state to themselves.
        cuts: which elements each server holds.
        replicas: all of them as they begin; where a replica is several ranks, they take their steps as one.
    """

    parameters: Mapping[str, Tensor]
    make_optimizer: Callable[[], AbstractOptimizer]
    cuts: Sequence[Sequence[Elements]]
    replicas: Sequence[Replica]
    compute: Compute
    clip_norm: float | None = None


def follow_gradients(
    plan: Plan, records: Sequence[Sequence[Decision]], setup: Setup
) -> tuple[Weights, dict[str, Weights]]:
    """The weights at the end, and the optimizer's slots by parameter; of ranks that push differences, rank 0's own.

    Raises:
        CorruptFileError: the records are not of one training.
    """
    follower = _Follower(plan, setup, records)
    left = [_events(decisions, may_run_ahead=_may_run_ahead(plan))[::-1] for decisions in records]
    while any(left):
        shard = next((shard for shard, events in enumerate(left) if events and follower.prepare(events[-1])), None)
        if shard is None:
            event = next(events[-1] for events in left if events)
            raise CorruptFileError(f"records of the shards do not fit together ({event}); prove another run")
        follower.do(shard, left[shard].pop())
    return follower.weights(), follower.slots()


def _may_run_ahead(plan: Plan) -> bool:
    """Whether a rank may be sent weights while its push before still waits for a round to close."""
    options = dict(plan.consistency.parameters)
    return options.get("commit") == "clock" and int(options["bound"]) > 0


def _events(decisions: Sequence[Decision], *, may_run_ahead: bool) -> list[Decision]:
    """Without weights that a rank asked for anew before it pushed, because another shard was further on."""
    events: list[Decision] = []
    is_sent: set[int] = set()  # ranks that, seen from the end, are sent weights before they push
    for decision in reversed(decisions):
        match decision:
            case Commit(pushes):
                is_sent -= {rank for rank, _ in pushes}
            case Drop(rank):
                is_sent.discard(rank)
            case Release(rank):
                if rank in is_sent and not may_run_ahead:
                    continue
                is_sent.add(rank)
            case _:
                continue
        events.append(decision)
    return events[::-1]


@dataclass
class _Order:
    """A model of whole tensors that is updated in the order of one shard, of which `pieces` count."""

    pieces: Sequence[Elements]
    model: Weights
    optimizer: AbstractOptimizer
    state: OptimizerState
    version: int = 0
    sent: dict[int, list[tuple[int, Weights | None]]] = field(default_factory=dict)  # by rank: version and weights


@dataclass
class _Rank:
    """A replica, the steps that it took, and what it has pushed."""

    replica: Replica
    optimizer: AbstractOptimizer
    steps: list[int]
    turn: int = 0  # the next of these steps
    held: list[list[tuple[float, Gradients]]] = field(default_factory=list)  # by shard, what waits for its turn
    taken: list[int] = field(default_factory=list)  # by shard, how many sets of weights it has taken up
    pushed: dict[tuple[int, int], tuple[float, Gradients]] = field(default_factory=dict)  # by shard and step
    told: dict[tuple[int, int], int] = field(default_factory=dict)  # by shard and step, the version it was sent
    about: dict[int, Computed] = field(default_factory=dict)  # by step


@final
class _Follower:
    def __init__(self, plan: Plan, setup: Setup, records: Sequence[Sequence[Decision]]) -> None:
        options = dict(plan.consistency.parameters)
        self._setup = setup
        self._size = plan.num_replicas
        self._num_shards = max(1, plan.num_shards)  # of each part of the model
        self._by_arrival = plan.commits_on_arrival
        self._round = rounding_of(plan)
        self._is_joined = plan.ranks_per_host > 1
        self._rate = str(options.get("lr", "share"))
        self._pushes_difference = options.get("push") == "difference"
        self._parts = int(options.get("parts", 1))
        self._start = clone(setup.parameters)
        self._orders = [self._make_order(pieces) for pieces in setup.cuts]
        self._settled = [_settled(decisions) for decisions in records]
        self._ranks = [self._make_rank(rank, replica) for rank, replica in enumerate(setup.replicas)]

    def _make_order(self, pieces: Sequence[Elements]) -> _Order:
        model = {piece.name: self._start[piece.name].clone() for piece in pieces}
        optimizer = self._setup.make_optimizer()
        return _Order(pieces, model, optimizer, optimizer.init(model))

    def _make_rank(self, rank: int, replica: Replica) -> _Rank:
        steps = sorted({step for settled in self._settled for step in settled.get(rank, ())})
        num_shards = len(self._orders)
        optimizer = self._setup.make_optimizer()
        replica.optimizer = optimizer.init(replica.weights)
        return _Rank(replica, optimizer, steps, held=[[] for _ in range(num_shards)], taken=[0] * num_shards)

    # Events.

    def prepare(self, event: Decision) -> bool:
        """Take the steps that an update is made of; whether all shards have sent the weights for them."""
        return not isinstance(event, Commit) or all(self._catch_up(rank, step) for rank, step in event.pushes)

    def do(self, shard: int, event: Decision) -> None:
        order = self._orders[shard]
        if isinstance(event, Commit):
            self._commit(shard, order, event.pushes)
        elif isinstance(event, Release):
            sent = order.sent.setdefault(event.rank, [])
            # In a step in which shard 0 only deals out work, it sends no weights.
            is_empty = shard % self._num_shards == 0 and len(sent) > 0 and (len(sent) - 1) % self._parts > 0
            sent.append((order.version, None if is_empty else round_all(self._round, order.model)))

    # Steps of a rank.

    def _catch_up(self, rank: int, step: int) -> bool:
        """Take the rank's steps up to this one; whether all shards have sent the weights for them."""
        own = self._ranks[rank]
        while step not in own.about:
            next_step = own.steps[own.turn]
            needed = [sum(earlier < next_step for earlier in s.get(rank, ())) for s in self._settled]
            if any(count >= len(o.sent.get(rank, ())) for count, o in zip(needed, self._orders, strict=True)):
                return False
            for shard, count in enumerate(needed):
                self._take_weights(rank, shard, count, next_step)
            self._take_step(rank, next_step)
        return True

    @torch.no_grad()
    def _take_weights(self, rank: int, shard: int, count: int, step: int) -> None:
        own, order = self._ranks[rank], self._orders[shard]
        own.told[shard, step], weights = order.sent[rank][count]
        if own.taken[shard] > count:
            return
        own.taken[shard] = count + 1
        order.sent[rank][count] = own.told[shard, step], None
        for piece in order.pieces if weights is not None else ():
            assert weights is not None
            piece.put(own.replica.weights[piece.name], piece.take(weights[piece.name]))

    def _take_step(self, rank: int, step: int) -> None:
        own = self._ranks[rank]
        batch, share = divmod(step, self._size) if self._by_arrival else (step, rank)
        computed = self._setup.compute(own.replica, batch, share)
        given = self._difference(own, computed) if self._pushes_difference else self._own_gradient(computed)
        own.about[step] = computed
        for shard, held in enumerate(own.held):
            held.append((computed.share, given))
            is_due = shard % self._num_shards % self._parts == own.turn % self._parts
            share_pushed, total = computed.share, given
            if self._parts > 1:
                share_pushed, total = _add_up(held) if is_due else (computed.share, {})
            own.pushed[shard, step] = share_pushed, self._sent(total)
            if is_due:
                own.held[shard] = []
        own.turn += 1

    def _sent(self, gradients: Gradients) -> Gradients:
        return {name: None if tensor is None else self._round(tensor) for name, tensor in gradients.items()}

    def _own_gradient(self, computed: Computed) -> Gradients:
        """A gradient that is used singly is clipped by its rank; the sum of a round, when it is there."""
        limit = self._setup.clip_norm
        if limit is None or not self._by_arrival:
            return computed.gradients
        return clip_by_norm({name: computed.gradients.get(name) for name in self._start}, limit)

    def _difference(self, own: _Rank, computed: Computed) -> Gradients:
        replica, gradients = own.replica, computed.gradients
        before = clone(replica.weights)
        update = Update(own.optimizer, replica.weights, replica.optimizer, computed.lr, self._setup.clip_norm)
        replica.optimizer = update.apply(gradients)
        return {n: w.detach() - before[n] for n, w in replica.weights.items() if gradients.get(n) is not None}

    # Updates.

    @torch.no_grad()
    def _commit(self, shard: int, order: _Order, pushes: Sequence[Push]) -> None:
        computed = [self._ranks[rank].about[step] for rank, step in pushes]
        pushed = [self._ranks[rank].pushed.pop((shard, step)) for rank, step in pushes]
        shares, given = [share for share, _ in pushed], [gradients for _, gradients in pushed]
        whole = sum(shares)
        if self._by_arrival:
            oldest = min(self._ranks[rank].told[shard, step] for rank, step in pushes)
            stale = 1.0 / max(1, order.version - oldest)
            factor = {"share": whole, "staleness": stale, "full": 1.0}[self._rate]
            shares = [share / whole if whole else 1 / len(shares) for share in shares]
        else:
            factor = 1.0
            if len(pushes) < self._size and whole:
                shares = [share / whole for share in shares]
        if any(shares):
            total = _mean(given, shares, order.model)
            self._update(order, self._sent(total) if self._is_joined else total, factor, computed[0].lr)
        order.version += 1

    def _update(self, order: _Order, total: Gradients, factor: float, lr: float) -> None:
        if all(tensor is None for tensor in total.values()):
            return
        if self._pushes_difference:
            for name, tensor in total.items():
                if tensor is not None:
                    order.model[name].add_(tensor, alpha=factor)
            return
        if self._setup.clip_norm is not None and not self._by_arrival:
            total = clip_by_norm(total, self._setup.clip_norm)
        order.state = order.optimizer.update(total, order.model, order.state, factor * lr)

    # The end.

    @torch.no_grad()
    def weights(self) -> Weights:
        found = clone(self._start)
        for order in self._orders:
            for piece in order.pieces:
                piece.put(found[piece.name], piece.take(order.model[piece.name]))
        return found

    @torch.no_grad()
    def slots(self) -> dict[str, Weights]:
        if self._pushes_difference:
            return {name: clone(slots) for name, slots in self._ranks[0].replica.optimizer.slots.items()}
        found: dict[str, Weights] = {}
        for order in self._orders:
            for piece in order.pieces:
                slots = order.state.slots.get(piece.name, {})
                if piece.name not in found:
                    found[piece.name] = clone(slots)
                for slot, tensor in slots.items():
                    if tensor.shape == order.model[piece.name].shape:  # not a counter
                        piece.put(found[piece.name][slot], piece.take(tensor))
        return found


def _add_up(steps: Sequence[tuple[float, Gradients]]) -> tuple[float, Gradients]:
    """The mean of the shares, and the sum of the gradients, each times its own share, over that mean."""
    mean = sum(share for share, _ in steps) / len(steps)
    total: dict[str, Tensor | None] = {}
    for share, gradients in steps if mean else ():
        for name, gradient in gradients.items():
            if gradient is not None:
                before = total.get(name)
                total[name] = gradient * share if before is None else before + gradient * share
    return mean, {name: tensor / mean for name, tensor in total.items() if tensor is not None}


def _settled(decisions: Sequence[Decision]) -> dict[int, list[int]]:
    """By rank, the steps whose pushes a shard used or dropped."""
    pushes = [p for d in decisions if isinstance(d, Commit) for p in d.pushes]
    pushes += [(d.rank, d.step) for d in decisions if isinstance(d, Drop)]
    found: dict[int, list[int]] = {}
    for rank, step in pushes:
        found.setdefault(rank, []).append(step)
    return found


def _mean(given: Sequence[Gradients], shares: Sequence[float], names: Mapping[str, Tensor]) -> Gradients:
    """Added in the order of the record; a gradient that only some have counts as zeros of the others."""
    total: dict[str, Tensor | None] = {}
    for name in names:
        terms = [(g[name], share) for g, share in zip(given, shares, strict=True) if g.get(name) is not None]
        sums = [tensor * share for tensor, share in terms if tensor is not None]
        total[name] = sum(sums[1:], sums[0]) if sums else None
    return total
