"""A host server: it stands between the workers of one host and the global shards, and joins what waits.

worker 0   push ~>|                                  |~> weights          while a push is under way to the shards,
worker 1     push ~>|(waits)                         |  joined ~> ...     gradients that come are held; then those
worker 2       push ~>|(waits)                       |  joined ~> ...     that wait set out as one weighted mean,
host       [0] =======> shards =======> weights of all [1 + 2] =====>     which counts by the sum of their shares

Between hosts go one gradient and one set of weights for all that were joined. The shards know whose gradients they are,
give each of their ranks its next step, and record them; what was joined is recorded here too, and is repeated by it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from weft.distributed.consistency.server.decisions import Commit, Push, Release
from weft.distributed.consistency.server.joins import Joins
from weft.distributed.consistency.server.journal import Journal, Summary, journal_file
from weft.distributed.consistency.server.protocol import (
    ForwardHeader,
    MalformedError,
    PushHeader,
    Tag,
    read_int,
    read_ints,
    server_address,
    with_absent,
)
from weft.distributed.consistency.server.reunion import find_missing
from weft.distributed.consistency.server.weighted_sum import weighted_sum
from weft.distributed.mailbox import JOINED, LEFT, AbstractMailbox, Message

__all__ = ["HostSpec", "serve_host"]


@dataclass(frozen=True)
class HostSpec:
    """What a host server is for.

    Args:
        inner: ranks to a host server; the last may have fewer.
        make_joins: for the seed of a training.
        run: the run folder, where it records what it joined; None to record nothing.
        kept: a file that is there if a host server of this number has trained before; None where none is restored.
    """

    host: int
    num_workers: int
    num_shards: int
    inner: int
    plan: str
    make_joins: Callable[[int], Joins]
    run: Path | None = None
    kept: Path | None = None

    @property
    def ranks(self) -> range:
        first = self.host * self.inner
        return range(first, min(first + self.inner, self.num_workers))

    @property
    def shards(self) -> tuple[int, ...]:
        """The addresses of the shards."""
        return tuple(server_address(self.num_workers, shard) for shard in range(self.num_shards))


def serve_host(mailbox: AbstractMailbox, spec: HostSpec) -> Summary:
    """Serve the workers of a host until all have left; of the last training, how many pushes were forwarded."""
    return _Host(mailbox, spec).serve()


@dataclass(frozen=True, eq=False)
class _Held:
    """A push that waits."""

    header: PushHeader
    tensors: tuple[Tensor | None, ...]


@dataclass(frozen=True, eq=False)
class _Forward:
    """A push that is under way to the shards, and their answers so far."""

    number: int
    pushes: tuple[Push, ...]
    parts: tuple[tuple[int, int, float], ...]
    lr: float
    tensors: tuple[tuple[Tensor | None, ...], ...]  # by shard
    answers: dict[int, Message] = field(default_factory=dict)


@final
class _Training:
    """One training: what waits, and what is under way."""

    def __init__(self, run: int, counts: tuple[int, ...], joins: Joins) -> None:
        self.run = run
        self.counts = counts  # pieces of each shard
        self.joins = joins
        self.journal: Journal | None = None
        self.last_step: dict[int, int] = {}
        self.waiting: dict[Push, _Held] = {}
        self.under_way: _Forward | None = None
        self.num_forwards = 0
        self.versions = [0] * len(counts)  # of each shard's weights, as last seen
        self.weights: tuple[Tensor, ...] = ()  # those that came last
        self._shapes: dict[int, tuple[torch.Size, torch.dtype]] = {}  # of every piece that has been seen

    def accepts(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether pieces are of the shapes and types of those before them."""
        found = {i: (tensor.shape, tensor.dtype) for i, tensor in enumerate(tensors) if tensor is not None}
        self._shapes = found | self._shapes
        return all(self._shapes[i] == shape for i, shape in found.items())

    def cut(self, tensors: tuple[Tensor | None, ...]) -> tuple[tuple[Tensor | None, ...], ...]:
        """All pieces, by shard."""
        ends = [sum(self.counts[: shard + 1]) for shard in range(len(self.counts))]
        return tuple(tensors[end - count : end] for end, count in zip(ends, self.counts, strict=True))


@final
class _Host:
    def __init__(self, mailbox: AbstractMailbox, spec: HostSpec) -> None:
        self._mailbox = mailbox
        self._spec = spec
        self._gone: set[int] = set()
        self._refused: Counter[str] = Counter()
        self._training: _Training | None = None
        self._is_heir = spec.kept is not None and spec.kept.exists()

    def serve(self) -> Summary:
        self._mailbox.follow_peers()
        if self._is_heir:
            self._gone = find_missing(self._mailbox, self._spec.ranks)
        try:
            while len(self._gone) < len(self._spec.ranks):
                self._take_turn()
        finally:
            summary = self._end_training()
        return summary

    # Messages.

    def _take_turn(self) -> None:
        """All messages that are there, before anything sets out: ranks that push together stay together."""
        message: Message | None = self._mailbox.receive()
        while message is not None:
            self._admit(message)
            message = self._mailbox.poll()
        if self._training is not None:
            self._move_on(self._training)

    def _admit(self, message: Message) -> None:
        is_own, is_shard = message.source in self._spec.ranks, message.source in self._spec.shards
        if message.tag in (JOINED, LEFT):
            if is_own:
                (self._gone.add if message.tag == LEFT else self._gone.discard)(message.source)
            elif is_shard and message.tag == JOINED:
                self._send_again(message.source)
        elif is_own or is_shard:
            try:
                self._handle(message, is_shard=is_shard)
            except MalformedError:
                self._refused["malformed"] += 1
        else:
            self._refused["unknown rank"] += 1

    def _handle(self, message: Message, *, is_shard: bool) -> None:
        run = read_int(message.header, "run")
        if message.tag == Tag.PUSH and not is_shard:
            self._meet(run, message)
        training = self._training
        match message.tag:
            case _ if training is None or run != training.run:
                self._refused["late"] += 1
            case Tag.PUSH if not is_shard:
                self._hold(training, message)
            case Tag.WEIGHTS if is_shard:
                self._take_answer(training, message)
            case _:
                self._refused["unknown tag"] += 1

    def _meet(self, run: int, message: Message) -> None:
        """A push may be of a training that is new here."""
        if self._training is not None and run <= self._training.run:
            return
        seed, counts = read_int(message.header, "seed"), read_ints(message.header, "counts")
        if len(counts) != self._spec.num_shards:
            raise MalformedError("counts")
        self._end_training()
        if self._spec.kept is not None:
            self._spec.kept.touch()
        self._training = _Training(run, counts, self._spec.make_joins(seed))
        self._training.journal = self._open_journal(seed)

    def _hold(self, training: _Training, message: Message) -> None:
        header, rank = PushHeader.read(message.header), message.source
        tensors = with_absent(message.tensors, header.absent, sum(training.counts))
        if header.in_part or not training.accepts(tensors):
            raise MalformedError("tensors")
        if header.step <= training.last_step.get(rank, -1):
            self._refused["duplicate"] += 1
            return
        training.last_step[rank] = header.step
        training.waiting[rank, header.step] = _Held(header, tensors)

    def _take_answer(self, training: _Training, message: Message) -> None:
        shard, forward = self._spec.shards.index(message.source), training.under_way
        training.versions[shard] = read_int(message.header, "version")
        if forward is None or shard in forward.answers:
            self._refused["duplicate"] += 1
            return
        forward.answers[shard] = message
        if len(forward.answers) == self._spec.num_shards:
            training.under_way = None
            self._hand_out(training, forward)

    # Pushes.

    def _move_on(self, training: _Training) -> None:
        """Let what waits set out, unless something is under way."""
        for rank, step in training.joins.dismiss(training.waiting) if training.weights else ():
            del training.waiting[rank, step]
            self._answer(training, Release(rank, step + 1, stop=True))
        chosen = () if training.under_way is not None else training.joins.choose(training.waiting)
        if not chosen:
            return
        held = [training.waiting.pop(push) for push in chosen]
        training.under_way = join(training.num_forwards, chosen, held, training.cut)
        training.num_forwards += 1
        self._note(training, Commit(chosen))
        for shard in range(self._spec.num_shards):
            self._send(training, training.under_way, shard)

    def _send(self, training: _Training, forward: _Forward, shard: int) -> None:
        tensors = forward.tensors[shard]
        absent = tuple(index for index, tensor in enumerate(tensors) if tensor is None)
        header = ForwardHeader(
            training.run, forward.number, training.versions[shard], forward.lr, forward.parts, absent
        )
        given = [tensor for tensor in tensors if tensor is not None]
        self._mailbox.start_send(self._spec.shards[shard], Tag.FORWARD, header.to_json(), given)

    def _send_again(self, address: int) -> None:
        """A shard has come, perhaps in the place of one that had an answer to give."""
        shard, training = self._spec.shards.index(address), self._training
        if training is not None and training.under_way is not None and shard not in training.under_way.answers:
            self._send(training, training.under_way, shard)

    def _hand_out(self, training: _Training, forward: _Forward) -> None:
        """Weights for every rank whose gradient was among those; shard 0 says which step it takes."""
        answers = [forward.answers[shard] for shard in range(self._spec.num_shards)]
        training.weights = tuple(tensor for answer in answers for tensor in answer.tensors)
        for rank, step, stop in answers[0].header["releases"]:
            release = Release(rank, step, stop, forward.number)
            self._answer(training, release)
            self._note(training, release)

    def _answer(self, training: _Training, release: Release) -> None:
        """Without waiting: a worker that is gone, or slow to listen, holds up nobody."""
        header = {"run": training.run, "version": training.versions[0], "step": release.step, "stop": release.stop}
        self._mailbox.start_send(release.rank, Tag.WEIGHTS, header, training.weights)

    # The record.

    def _note(self, training: _Training, decision: Commit | Release) -> None:
        if training.journal is not None:
            training.journal.note(decision)

    def _open_journal(self, seed: int) -> Journal | None:
        spec = self._spec
        if spec.run is None:
            return None
        about = {"plan": spec.plan, "workers": spec.num_workers, "host": spec.host, "seed": seed}
        path = journal_file(spec.run, seed, spec.host, "host")
        journal = Journal(path, about, goes_on=self._is_heir, clock=self._mailbox.clock.now)
        if self._is_heir:
            journal.restored(0)
            self._is_heir = False
        return journal

    def _end_training(self) -> Summary:
        refused = dict(sorted((self._refused + Counter(self._mailbox.refusals())).items()))
        training = self._training
        summary = Summary(updates=training.num_forwards if training else 0, refused=refused)
        if training is not None and training.journal is not None:
            training.journal.end(summary)
            training.journal = None
        return summary


def join(
    number: int,
    pushes: tuple[Push, ...],
    held: Sequence[_Held],
    cut: Callable[[tuple[Tensor | None, ...]], tuple[tuple[Tensor | None, ...], ...]],
) -> _Forward:
    """The mean of what waits, weighted by shares of the batch, which counts by their sum. One alone is as it came."""
    shares = [one.header.weight for one in held]
    whole = sum(shares)
    factors = [share / whole if whole else 1 / len(held) for share in shares]
    total = weighted_sum([one.tensors for one in held], factors)
    parts = tuple((rank, step, share) for (rank, step), share in zip(pushes, shares, strict=True))
    return _Forward(number, pushes, parts, held[0].header.lr, cut(tuple(total)))
