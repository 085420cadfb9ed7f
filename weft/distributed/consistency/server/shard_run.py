"""One training on one shard: what ranks say becomes events for the policy, what it decides updates and answers."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from torch import Tensor

from weft.distributed.consistency.control import Coordinator, Journal, MalformedError, Outgoing, read_int
from weft.distributed.consistency.server.answers import Answers, RankRecord
from weft.distributed.consistency.server.clipping import NormExchange
from weft.distributed.consistency.server.decisions import Commit, Decision, Drop, Join, Push, Release, Summary
from weft.distributed.consistency.server.policy import AbstractPolicy
from weft.distributed.consistency.server.protocol import ForwardHeader, PushHeader, Tag, with_absent
from weft.distributed.consistency.server.shard import Contribution
from weft.distributed.consistency.server.shard_state import ServerSpec, ShardState
from weft.distributed.mailbox import AbstractMailbox, Message
from weft.errors import PeerLostError

__all__ = ["ShardRun"]

MOST_AGES = 4000
"""Different stalenesses that are told to a worker."""


@final
class ShardRun:
    """Ranks, their gradients in hand, and decisions that are still to be carried out; the weights are the state's.

    Args:
        coordinator: who is left; it outlives the training.
        restored_at: the version with which a server took the place of one that was lost.
    """

    def __init__(
        self,
        mailbox: AbstractMailbox,
        *,
        spec: ServerSpec,
        state: ShardState,
        coordinator: Coordinator,
        policy: AbstractPolicy,
        journal: Journal,
        restored_at: int | None = None,
    ) -> None:
        self._mailbox = mailbox
        self._spec = spec
        self._state = state
        self._coordinator = coordinator
        self._journal = journal
        self._restored_at = restored_at
        self.policy = policy
        self._ranks = {rank: RankRecord() for rank in range(spec.settings.num_workers)}
        self.pending: dict[Push, Contribution] = {}  # by the first push of those that a host server joined
        self._answers = Answers(state)
        self._decided: deque[Decision] = deque()
        self._norms: NormExchange | None = None
        if state.header.positions:
            peers = [address for address in spec.settings.shards if address != mailbox.address]
            self._norms = NormExchange(mailbox, header=state.header, peers=peers)
        self._num_dropped = self._num_lost = self._num_returned = 0
        self._missing: int | None = None  # a rank that is gone, where ranks are synchronous

    # What ranks, host servers and other shards say.

    def handle(self, message: Message) -> None:
        """Raises MalformedError."""
        rank = message.source
        if self._missing is not None and message.tag in (Tag.PUSH, Tag.SUM):
            raise _missed(self._missing)
        match message.tag:
            case Tag.PART:
                self._ranks[rank].part = read_int(message.header, "step"), message.tensors
            case Tag.PUSH:
                self._take_push(rank, PushHeader.read(message.header), message.tensors)
            case Tag.FORWARD:
                self._take_forward(message)
            case Tag.NORMS if self._norms is not None:
                self._norms.take(message)
                self._carry_out()
            case Tag.STOP:
                self._carry_out(self.policy.stop())
            case Tag.END:
                self._end(rank)
            case Tag.SUM:
                self._send(self._coordinator.add(message))
            case Tag.PULL:
                self._state.send_exact(rank, Tag.WEIGHTS, self._statistics(), self._state.shard.weights)
            case Tag.FETCH:
                self._state.send_optimizer_state(rank)
            case _:
                self._coordinator.refused["unknown tag"] += 1

    def greet(self, message: Message) -> None:
        """A rank wants weights: at the start, or after it or the server before this one was lost."""
        step = None if message.header.get("step") is None else read_int(message.header, "step")
        rank, coordinator = message.source, self._coordinator
        if rank in coordinator.gone:
            if coordinator.sums.has_begun:  # others have ended, and would wait for its part in their sums
                coordinator.refused["late"] += 1
                return
            coordinator.gone.discard(rank)
            self._num_returned += 1
        self._count_lost(read_int(message.header, "version"))
        record = self._ranks[rank]
        record.is_greeting, record.host, record.part, record.release = True, None, None, None
        self._carry_out(self.policy.arrive(rank, step, self._now))

    def lose(self, rank: int) -> None:
        """Synchronous ranks take no step, and add up nothing, without one that is gone; when all have ended, nothing is
        left to do without it."""
        self._ranks[rank].part = None
        if self._spec.settings.is_synchronous:
            self._missing = rank
            if self.pending or self._coordinator.sums.is_waiting:
                raise _missed(rank)
            return
        self._carry_out(self.policy.leave(rank, self._now))
        self._send(self._coordinator.lose(rank))

    def lose_shard(self, address: int) -> None:
        if self._norms is not None:
            self._norms.lose(address)
            self._carry_out()

    def ring(self) -> None:
        self._carry_out(self.policy.ring(self._now))

    def _take_push(self, rank: int, header: PushHeader, tensors: Sequence[Tensor]) -> None:
        record = self._ranks[rank]
        if not record.is_known:  # it was let go by a server that is lost, and so are the weights it used
            self._coordinator.gone.discard(rank)
            record.part = None  # what set out before may be with the lost one
            record.wants_weights = header.wants
            self._count_lost(header.version)
            self._carry_out(self.policy.arrive(rank, header.step + 1, self._now))
            return
        if header.in_part:
            part, record.part = record.part, None
            if part is None or part[0] != header.step:
                raise MalformedError("part")
            tensors = part[1]
        given = self._accept(tensors, header.absent)
        if not self._expects([(rank, header.step)]):
            return
        record.wants_weights = header.wants
        version = self._take_version(rank, header.step)
        loss = None if header.loss is None else float.fromhex(header.loss)
        self.pending[rank, header.step] = Contribution(
            rank, header.step, version, header.weight, header.lr, given, loss=loss, settings=header.settings
        )
        self._carry_out(self.policy.push(rank, header.step, self._now))

    def _take_forward(self, message: Message) -> None:
        """Gradients that a host server joined. All of them are used, or none."""
        header, host = ForwardHeader.read(message.header), message.source
        given = self._accept(message.tensors, header.absent)
        settings = self._spec.settings
        if any(rank >= settings.num_workers or settings.host_of(rank) != host for rank, _ in header.pushes):
            raise MalformedError("parts")
        if not self._answers.expects(host, message.incarnation, header.number):
            self._coordinator.refused["duplicate"] += 1
            return
        if not all(self._ranks[rank].is_known for rank, _ in header.pushes):  # let go by a server that is lost
            self._count_lost(header.version)
            self._answers.owe(host)  # also if all of them have died meanwhile
            present = [push for push in header.pushes if push[0] not in self._coordinator.gone]
            for rank, _ in present:
                self._ranks[rank].host = host
            self._carry_out([d for rank, step in present for d in self.policy.arrive(rank, step + 1, self._now)])
            return
        if not self._expects(header.pushes):
            return
        for rank, _ in header.pushes:
            self._ranks[rank].host = host
        versions = sorted(self._take_version(rank, step) for rank, step in header.pushes)
        (rank, step), *others = header.pushes
        weight = sum(share for _, _, share in header.parts)
        self.pending[rank, step] = Contribution(
            rank,
            step,
            versions[0],
            weight,
            header.lr,
            given,
            others=tuple(versions[1:]),
            host=host,
            settings=header.settings,
        )
        self._carry_out(self.policy.push(rank, step, self._now, others))

    def _accept(self, tensors: Sequence[Tensor], absent: Sequence[int]) -> tuple[Tensor | None, ...]:
        given = self._state.decode(with_absent(tensors, absent, len(self._state.shard.weights)))
        if not self._state.shard.accepts(given):
            raise MalformedError("tensors")
        return given

    def _expects(self, pushes: Sequence[Push]) -> bool:
        """Whether each rank was let go and has not pushed since."""
        records = [(self._ranks[rank], step) for rank, step in pushes]
        is_expected = all(record.release is not None and step > record.last_step for record, step in records)
        if not is_expected:
            self._coordinator.refused["duplicate"] += 1
        return is_expected

    def _take_version(self, rank: int, step: int) -> int:
        """Of the weights that a push was computed on; from now on the rank waits."""
        record = self._ranks[rank]
        release, record.release, record.last_step = record.release, None, step
        assert release is not None and release.version is not None, "a server fills it in"
        return release.version

    def _count_lost(self, version: int) -> None:
        """Ranks that have seen a later version tell how many updates died with the server before."""
        if self._restored_at is not None:
            self._num_lost = max(self._num_lost, version - self._restored_at)

    def _end(self, rank: int) -> None:
        self._carry_out(self.policy.leave(rank, self._now))
        self._ranks[rank].has_ended = True
        ended = {rank for rank, record in self._ranks.items() if record.has_ended}
        self._state.save(
            is_due=len(ended | self._coordinator.gone) == self._spec.settings.num_workers
        )  # what all end with

    # What the policy decided.

    def _carry_out(self, decisions: Sequence[Decision] = ()) -> None:
        """One after the other; an update for which norms of other shards are missing holds up what comes after it."""
        self._decided += decisions
        while self._decided:
            decision = self._decided[0]
            match decision:
                case Commit(pushes):
                    if not self._commit(pushes):
                        break
                case Drop(rank, step):
                    del self.pending[rank, step]
                    self._num_dropped += 1
                case Release(rank):
                    decision = replace(decision, version=self._state.shard.version)
                    record = self._ranks[rank]
                    record.release, record.is_known = decision, True
                    self._answers.answer(record, decision)
                case Join(rank):
                    self._ranks[rank].last_step = -1
                case _:
                    pass
            self._decided.popleft()
            self._journal.note(decision)
        self._answers.answer_hosts()

    def _commit(self, pushes: Sequence[Push]) -> bool:
        """One update; False while norms of other shards are missing."""
        contributions = [self.pending[push] for push in pushes if push in self.pending]
        assert sum(1 + len(one.others) for one in contributions) == len(pushes), "every push is in hand"
        factor = None
        if self._norms is not None:
            if not self._norms.has_started(self._state.shard.version):
                self._norms.start(self._state.shard.version, self._state.shard.norms(contributions))
            factor = self._norms.take_factor()
            if factor is None:
                return False
        self._answers.answer_hosts()  # before the weights change
        for contribution in contributions:
            del self.pending[contribution.rank, contribution.step]
            if contribution.host is not None:
                self._answers.owe(contribution.host)
        if self._spec.settings.form == "weights":
            for rank, _ in pushes:
                self._ranks[rank].centre = self._state.shard.weights
        self._answers.loss = self._state.commit(contributions, factor)
        return True

    def _send(self, messages: Sequence[Outgoing]) -> None:
        for message in messages:
            self._mailbox.start_send(message.to, message.tag, message.header, message.tensors)

    @property
    def _now(self) -> float:
        return self._mailbox.clock.now()

    # What is known of the whole training.

    def _statistics(self) -> dict[str, Any]:
        summary = self.summary({})
        ages = [[age, count] for age, count in enumerate(summary.staleness) if count]
        # A header is small: of ages beyond all measure only the record tells.
        counts = {"dropped": summary.dropped, "lost": summary.lost, "returned": summary.returned}
        return {"staleness": ages[:MOST_AGES], **counts}

    def summary(self, refused: Mapping[str, int]) -> Summary:
        ages = self._state.shard.staleness
        return Summary(
            updates=self._state.shard.version,
            staleness=tuple(ages[age] for age in range(max(ages, default=-1) + 1)),
            dropped=self._num_dropped,
            refused=dict(refused),
            lost=self._num_lost,
            returned=self._num_returned,
        )

    def end(self, summary: Summary) -> None:
        self._journal.end(summary)


def _missed(rank: int) -> PeerLostError:
    about = f"rank: {rank}, ranks take no step without each other"
    return PeerLostError(f"rank {rank} is lost ({about}); start again", rank)
