"""A server: one shard, its policy, and the messages that reach them."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import final

from torch import Tensor

from weft.distributed.consistency.server.decisions import Commit, Decision, Drop, Join, Release
from weft.distributed.consistency.server.journal import Summary
from weft.distributed.consistency.server.kept import recall
from weft.distributed.consistency.server.protocol import (
    ForwardHeader,
    InitHeader,
    MalformedError,
    PushHeader,
    Tag,
    read_int,
    with_absent,
)
from weft.distributed.consistency.server.reunion import find_missing
from weft.distributed.consistency.server.shard import Contribution, Shard
from weft.distributed.consistency.server.training import ServerSpec, Training
from weft.distributed.mailbox import JOINED, LEFT, AbstractMailbox, Message
from weft.errors import DeadlineError

__all__ = ["serve"]

MOST_AGES = 4000
"""Different stalenesses that are told to a worker."""


def serve(mailbox: AbstractMailbox, spec: ServerSpec) -> Summary:
    """Serve the workers until all have left; what was done in the last training."""
    return _Server(mailbox, spec).serve()


@final
class _Server:
    def __init__(self, mailbox: AbstractMailbox, spec: ServerSpec) -> None:
        self._mailbox = mailbox
        self._spec = spec
        self._gone: set[int] = set()
        self._refused: Counter[str] = Counter()
        self._early: list[Message] = []  # greetings that came before the first training
        self._training: Training | None = None
        self._owed: dict[int, list[Release]] = {}  # by the address of a host server, what to tell it

    def serve(self) -> Summary:
        self._mailbox.follow_peers()
        self._restore()
        try:
            while len(self._gone) < self._spec.num_workers:
                self._take_turn()
        finally:
            summary = self._end_training()
        return summary

    # Messages.

    def _take_turn(self) -> None:
        alarm = self._training.policy.alarm() if self._training else math.inf
        try:
            message = self._mailbox.receive(deadline=alarm)
        except DeadlineError:
            self._carry_out(self._current.policy.ring(self._now))
            return
        workers = range(self._spec.num_workers)
        if message.tag in (JOINED, LEFT):
            if message.tag == LEFT and message.source in workers:
                self._lose(message.source)
        elif message.source in (self._spec.hosts if message.tag == Tag.FORWARD else workers):
            self._admit(message)
        else:
            self._refused["unknown rank"] += 1

    def _admit(self, message: Message) -> None:
        try:
            self._handle(message)
        except MalformedError:
            self._refused["malformed"] += 1

    def _handle(self, message: Message) -> None:
        match message.tag:
            case Tag.INIT:
                self._begin(message)
            case _ if self._training is None:
                self._early.append(message)
            case Tag.HELLO:
                self._greet(message)
            case _ if message.header.get("run") != self._current.header.run:
                self._refused["late"] += 1
            case Tag.PART:
                step = read_int(message.header, "step")
                self._current.parts[message.source] = (step, message.tensors)
            case Tag.PUSH:
                self._take_push(message)
            case Tag.FORWARD:
                self._take_forward(message)
            case Tag.STOP:
                self._carry_out(self._current.policy.stop())
            case Tag.END:
                self._end_rank(message.source)
            case Tag.SUM:
                self._add_to_sum(message)
            case Tag.PULL:
                self._send(message.source, Tag.WEIGHTS, {**self._position(), **self._statistics()}, self._shard.weights)
            case Tag.FETCH:
                self._send_state(message.source)
            case _:
                self._refused["unknown tag"] += 1

    def _begin(self, message: Message) -> None:
        header = InitHeader.read(message.header)
        num_weights = header.num_pieces + len(header.slots)
        if message.source != 0 or len(message.tensors) != num_weights + header.num_buffers:
            raise MalformedError("tensors")
        if self._training is not None and header.run == self._training.header.run:
            self._refused["duplicate"] += 1
            return
        self._end_training()
        weights, slots = message.tensors[: header.num_pieces], message.tensors[header.num_pieces : num_weights]
        self._training = Training(self._mailbox, self._spec, header, weights, message.tensors[num_weights:])
        self._training.begin(slots)
        for rank in sorted(self._gone):  # who was lost before is not waited for now
            self._carry_out(self._training.policy.leave(rank, self._now))
        early, self._early = self._early, []
        for greeting in early:
            self._admit(greeting)

    def _greet(self, message: Message) -> None:
        step = None if message.header.get("step") is None else read_int(message.header, "step")
        if read_int(message.header, "run") > self._current.header.run:  # of a training that rank 0 is yet to begin
            self._early.append(message)
            return
        rank, training = message.source, self._current
        if rank in self._gone:
            if training.sums.has_begun:  # others have ended, and would wait for its part in their sums
                self._refused["late"] += 1
                return
            self._gone.discard(rank)
            training.num_returned += 1
        self._count_lost(read_int(message.header, "version"))
        training.greeted.add(rank)
        training.behind.pop(rank, None)
        training.parts.pop(rank, None)
        training.told.pop(rank, None)
        self._carry_out(training.policy.arrive(rank, step, self._now))

    def _count_lost(self, version: int) -> None:
        """Ranks that have seen a later version tell how many updates died with the server before."""
        training = self._current
        if training.restored_at is not None:
            training.num_lost = max(training.num_lost, version - training.restored_at)

    def _take_push(self, message: Message) -> None:
        header, rank, training = PushHeader.read(message.header), message.source, self._current
        if rank not in training.met:  # it was let go by a server that is lost, and so are the weights it used
            self._gone.discard(rank)
            training.parts.pop(rank, None)  # what set out before may be with the lost one
            self._note_wish(rank, header)
            self._count_lost(header.version)
            self._carry_out(training.policy.arrive(rank, header.step + 1, self._now))
            return
        tensors = message.tensors
        if header.in_part:
            step, tensors = training.parts.pop(rank, (-1, ()))
            if step != header.step:
                raise MalformedError("part")
        given = with_absent(tensors, header.absent, len(self._shard.weights))
        if not self._shard.accepts(given):
            raise MalformedError("tensors")
        if not training.expects(rank, header.step):
            self._refused["duplicate"] += 1
            return
        self._note_wish(rank, header)
        version = training.take_version(rank, header.step)
        training.pending[rank, header.step] = Contribution(rank, header.step, version, header.weight, header.lr, given)
        self._carry_out(training.policy.push(rank, header.step, self._now))

    def _note_wish(self, rank: int, header: PushHeader) -> None:
        (self._current.content.discard if header.wants else self._current.content.add)(rank)

    def _take_forward(self, message: Message) -> None:
        """What a host server joined. All of it is used, or nothing."""
        header, training = ForwardHeader.read(message.header), self._current
        given = with_absent(message.tensors, header.absent, len(self._shard.weights))
        if not self._shard.accepts(given) or not self._spec.are_of_host([r for r, _ in header.pushes], message.source):
            raise MalformedError("tensors")
        life = message.source, message.incarnation
        if header.number <= training.forwards.get(life, -1):
            self._refused["duplicate"] += 1
            return
        training.forwards[life] = header.number
        if any(rank not in training.met for rank, _ in header.pushes):  # let go by a server that is lost
            self._count_lost(header.version)
            present = [(rank, step) for rank, step in header.pushes if rank not in self._gone]
            self._owed.setdefault(message.source, [])  # also if all of them have died meanwhile
            training.behind |= {rank: message.source for rank, _ in present}
            self._carry_out([d for r, step in present for d in training.policy.arrive(r, step + 1, self._now)])
            return
        if not all(training.expects(rank, step) for rank, step in header.pushes):
            self._refused["duplicate"] += 1
            return
        training.behind |= {rank: message.source for rank, _ in header.pushes}
        versions = sorted(training.take_version(rank, step) for rank, step in header.pushes)
        (rank, step), *others = header.pushes
        weight = sum(share for _, _, share in header.parts)
        training.joined[header.pushes] = Contribution(
            rank, step, versions[0], weight, header.lr, given, others=tuple(versions[1:])
        )
        self._carry_out(training.policy.push(rank, step, self._now, others))

    def _end_rank(self, rank: int) -> None:
        training = self._current
        self._carry_out(training.policy.leave(rank, self._now))
        training.ended.add(rank)
        training.keep(is_due=len(training.ended | self._gone) == self._spec.num_workers)  # what all will end with

    def _add_to_sum(self, message: Message) -> None:
        number, sums = read_int(message.header, "number"), self._current.sums
        if len(message.tensors) != 1 or not sums.accepts(number, message.tensors[0]):
            raise MalformedError("tensors")
        sums.add(number, message.source, message.tensors[0])
        self._finish_sums()

    def _finish_sums(self) -> None:
        for number, ranks, total in self._current.sums.take_whole(set(range(self._spec.num_workers)) - self._gone):
            for rank in ranks:
                self._send(rank, Tag.TOTAL, {"number": number}, [total])

    def _lose(self, rank: int) -> None:
        self._gone.add(rank)
        if self._training is not None:
            self._training.parts.pop(rank, None)
            self._carry_out(self._training.policy.leave(rank, self._now))
            self._finish_sums()

    # Decisions.

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        training = self._current
        for decision in decisions:
            match decision:
                case Commit(pushes):
                    self._pay()
                    if pushes in training.joined:
                        self._owed[self._spec.host_of(pushes[0][0])] = []
                    training.commit(pushes)
                case Drop(rank, step):
                    del training.pending[rank, step]
                    training.num_dropped += 1
                case Release(rank):
                    decision = replace(decision, version=self._shard.version)
                    training.told[rank] = decision
                    training.met.add(rank)
                    self._answer(decision)
                case Join(rank):
                    training.last_step.pop(rank, None)
                case _:
                    pass
            training.note(decision)
        self._pay()

    def _pay(self) -> None:
        """Answer host servers, each for all ranks that were let go at once, before the weights change again."""
        owed, self._owed = self._owed, {}
        for host, releases in owed.items():
            told = [[release.rank, release.step, release.stop] for release in releases]
            self._send(host, Tag.WEIGHTS, {**self._position(), "releases": told}, self._shard.weights)

    def _answer(self, release: Release) -> None:
        training, rank = self._current, release.rank
        if rank in training.behind:
            self._owed.setdefault(training.behind.pop(rank), []).append(release)
            return
        header = {**self._position(), "step": release.step, "stop": release.stop}
        if rank in training.greeted:
            training.greeted.discard(rank)
            self._send(rank, Tag.WELCOME, header, [*self._shard.weights, *training.buffers])
        elif rank in training.found:
            self._send(rank, Tag.WEIGHTS, header | {"moved": True}, training.found.pop(rank))
        else:
            is_content = rank in training.content
            training.content.discard(rank)
            self._send(rank, Tag.WEIGHTS, header, () if is_content else self._shard.weights)

    def _send(self, rank: int, tag: str, header: dict[str, object], tensors: Sequence[Tensor]) -> None:
        """Without waiting: a worker that is gone, or slow to listen, holds up nobody."""
        work = self._mailbox.start_send(rank, tag, header, tensors)
        if tag in (Tag.WELCOME, Tag.WEIGHTS) and tensors:
            self._current.lend(tuple(tensors[: len(self._shard.weights)]), work)

    def _send_state(self, rank: int) -> None:
        slots = [(int(name), slot, t) for name, own in self._shard.state.slots.items() for slot, t in own.items()]
        header = {"slots": [[index, slot] for index, slot, _ in slots], "updates": int(self._shard.state.shared.step)}
        header |= {"lr": float(self._shard.state.shared.lr)}
        self._send(rank, Tag.STATE, header, [tensor.clone() for _, _, tensor in slots])

    # Beginning and end.

    @property
    def _now(self) -> float:
        return self._mailbox.clock.now()

    @property
    def _current(self) -> Training:
        assert self._training is not None, "init comes first"
        return self._training

    @property
    def _shard(self) -> Shard:
        return self._current.shard

    def _position(self) -> dict[str, object]:
        return {"run": self._current.header.run, "version": self._shard.version}

    def _statistics(self) -> dict[str, object]:
        summary = self._summary()
        ages = [[age, count] for age, count in enumerate(summary.staleness) if count]
        # A header is small: of ages beyond all measure only the record tells.
        counts = {"dropped": summary.dropped, "lost": summary.lost, "returned": summary.returned}
        return {"staleness": ages[:MOST_AGES], **counts}

    def _summary(self) -> Summary:
        refused = dict(sorted((self._refused + Counter(self._mailbox.refusals())).items()))
        return Summary(refused=refused) if self._training is None else self._training.summary(refused)

    def _end_training(self) -> Summary:
        summary = self._summary()
        if self._training is not None:
            self._training.end(summary)
        return summary

    def _restore(self) -> None:
        """Go on where a server of the same shard was, if there has been one."""
        found = recall(self._spec.kept) if self._spec.kept is not None else None
        if found is None:
            return
        self._training = Training(self._mailbox, self._spec, found.header, found.weights, found.buffers, is_fresh=False)
        self._training.restore(found)
        self._gone = find_missing(self._mailbox, range(self._spec.num_workers))
