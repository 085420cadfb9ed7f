"""A host server: it stands between the workers of one host and the global shards, and joins what waits.

worker 0   push ~>|                                  |~> weights          while a push is under way to the shards,
worker 1     push ~>|(waits)                         |  joined ~> ...     gradients that come wait; then all that
worker 2       push ~>|(waits)                       |  joined ~> ...     wait set out as one weighted mean, which
host       [0] =======> shards =======> weights of all [1 + 2] =====>     counts by the sum of their shares

Between hosts go one gradient and one set of weights for all that were joined. The shards know whose gradients they are,
give each of their ranks its next step, and record them; what was joined is recorded here too, and is repeated by it.
A rank goes on when every shard has let it go, which with a bound may be after others that it was joined with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs import Bucket, decode_all, encode_all
from weft.distributed.consistency.control import (
    FLUSH_SECONDS,
    Coordinator,
    Journal,
    MalformedError,
    find_missing,
    journal_file,
    read_int,
    read_ints,
)
from weft.distributed.consistency.server.decisions import Commit, Push, Release, Summary
from weft.distributed.consistency.server.protocol import ForwardHeader, PushHeader, Tag, read_layout, with_absent
from weft.distributed.consistency.server.replay import JoinPolicy
from weft.distributed.consistency.server.settings import Settings
from weft.distributed.consistency.server.shard import weighted_sum
from weft.distributed.mailbox import JOINED, LEFT, AbstractMailbox, Message
from weft.errors import EncodingError

__all__ = ["HostSpec", "serve_host"]


@dataclass(frozen=True)
class HostSpec:
    """The specification of a host server.

    Args:
        make_policy: for the seed of a training.
        run: the run folder, where it records what it joined; None to record nothing.
        begun: a file that is there if a host server of this number has trained before; None where none is restored.
    """

    host: int
    plan: str
    settings: Settings
    make_policy: Callable[[int], JoinPolicy]
    run: Path | None = None
    begun: Path | None = None

    @property
    def ranks(self) -> range:
        """Whose gradients it joins; the last host may have fewer."""
        first = self.host * self.settings.inner
        return range(first, min(first + self.settings.inner, self.settings.num_workers))


def serve_host(mailbox: AbstractMailbox, spec: HostSpec) -> Summary:
    """Serve the workers of a host until all have left; of the last training, how many pushes were forwarded."""
    return _Host(mailbox, spec).serve()


Pieces = tuple[Tensor | None, ...]


@dataclass(frozen=True, eq=False)
class Forward:
    """A push that is under way to the shards."""

    number: int
    parts: tuple[tuple[int, int, float], ...]  # rank, step, share of the batch
    lr: float
    tensors: Pieces
    settings: str | None = None
    answered: set[int] = field(default_factory=set)  # shards


@dataclass(frozen=True, eq=False)
class Waiting:
    """A rank whose gradient has set out."""

    step: int
    forward: int
    releases: dict[int, tuple[Release, tuple[Tensor, ...]]] = field(default_factory=dict)  # by shard, with its weights


@final
class HostRun:
    """One training: gradients that wait, the push that is under way, and ranks that are to hear of it.

    Args:
        counts: pieces of each shard.
        buckets: what each piece is, where it travels encoded; empty where it does not.
    """

    def __init__(
        self,
        mailbox: AbstractMailbox,
        *,
        spec: HostSpec,
        run: int,
        counts: Sequence[int],
        buckets: Sequence[Bucket],
        policy: JoinPolicy,
        journal: Journal,
    ) -> None:
        self._mailbox = mailbox
        self._spec = spec
        self.run = run
        self._counts = tuple(counts)
        self._buckets = tuple(buckets)
        self._codec = spec.settings.make_codec(mailbox.address)  # with what it has not sent on of what it joined
        self._policy = policy
        self._journal = journal
        self._last_step: dict[int, int] = {}
        self._gradients: dict[Push, tuple[PushHeader, Pieces]] = {}
        self._shapes: dict[int, tuple[torch.Size, torch.dtype]] = {}  # of every piece that has been seen
        self._under_way: Forward | None = None
        self._waiting: dict[int, Waiting] = {}
        self._versions = [0] * len(counts)  # of each shard's weights, as last seen
        self._weights: tuple[Tensor, ...] = ()  # those that were handed out last
        self._num_sent = 0  # messages to shards
        self.num_forwards = 0

    def take_push(self, rank: int, header: PushHeader, tensors: Sequence[Tensor]) -> bool:
        """Whether it is new. Raises MalformedError."""
        pieces = self._decode(with_absent(tensors, header.absent, sum(self._counts)))
        if header.in_part or not self._accepts(pieces):
            raise MalformedError("tensors")
        if header.step <= self._last_step.get(rank, -1):
            return False
        self._last_step[rank] = header.step
        self._gradients[rank, header.step] = header, pieces
        return True

    def _decode(self, sent: Pieces) -> Pieces:
        try:
            return decode_all(self._codec, self._buckets, sent) if self._buckets else sent
        except EncodingError:
            raise MalformedError("tensors") from None

    def _encode(self, forward: Forward) -> Forward:
        """Once, also where it is sent again."""
        if not self._buckets:
            return forward
        return replace(forward, tensors=encode_all(self._codec, self._buckets, forward.tensors))

    def _accepts(self, pieces: Pieces) -> bool:
        """Whether pieces are of the shapes and types of those before them."""
        found = {i: (piece.shape, piece.dtype) for i, piece in enumerate(pieces) if piece is not None}
        self._shapes = found | self._shapes
        return all(self._shapes[i] == shape for i, shape in found.items())

    def move_on(self) -> None:
        """Let what waits set out, unless something is under way."""
        for rank, step in self._policy.dismiss(self._gradients) if self._weights else ():
            del self._gradients[rank, step]
            self._answer(Release(rank, step + 1, stop=True))
        chosen = () if self._under_way is not None else self._policy.choose(self._gradients)
        if not chosen:
            return
        given = [self._gradients.pop(push) for push in chosen]
        self._under_way = forward = self._encode(join(self._num_sent, chosen, given))
        self._waiting |= {rank: Waiting(step, self.num_forwards) for rank, step in chosen}
        self._num_sent += 1
        self.num_forwards += 1
        self._journal.note(Commit(chosen))
        for shard in range(self._spec.settings.num_shards):
            self._send(forward, shard)

    def take_answer(self, message: Message) -> bool:
        """Weights of a shard, with the ranks that it lets go; whether it was expected. Raises MalformedError."""
        shard, forward = self._spec.settings.shards.index(message.source), self._under_way
        self._versions[shard] = read_int(message.header, "version")
        is_answer = (
            forward is not None
            and shard not in forward.answered
            and read_int(message.header, "number") >= forward.number
        )
        if forward is not None and is_answer:
            forward.answered.add(shard)
            if len(forward.answered) == self._spec.settings.num_shards:
                self._under_way = None
        released = [Release(*release) for release in message.header["releases"] if release[0] in self._waiting]
        for release in released:
            self._waiting[release.rank].releases[shard] = release, message.tensors
            if len(self._waiting[release.rank].releases) == self._spec.settings.num_shards:
                self._let_go(self._waiting.pop(release.rank))
        return is_answer or bool(released)

    def _let_go(self, rank: Waiting) -> None:
        """The weights of all shards; shard 0 says which step the rank takes."""
        answers = [rank.releases[shard] for shard in range(self._spec.settings.num_shards)]
        self._weights = tuple(tensor for _, weights in answers for tensor in weights)
        first = answers[0][0]
        self._answer(first)
        self._journal.note(Release(first.rank, first.step, first.stop, rank.forward))

    def ask_again(self, address: int) -> None:
        """A shard has come, perhaps in the place of one that had an answer to give: of what is under way, and of ranks
        that it had not let go, for which a push without gradients asks."""
        shard, forward = self._spec.settings.shards.index(address), self._under_way
        on_the_way = set()
        if forward is not None and shard not in forward.answered:
            on_the_way = {rank for rank, _, _ in forward.parts}
            self._send(forward, shard)
        waiting = {r: w for r, w in self._waiting.items() if shard not in w.releases and r not in on_the_way}
        if waiting:
            parts = tuple((rank, one.step, 0.0) for rank, one in waiting.items())
            self._send(Forward(self._num_sent, parts, 0.0, (None,) * sum(self._counts)), shard)
            self._num_sent += 1

    def _send(self, forward: Forward, shard: int) -> None:
        end = sum(self._counts[: shard + 1])
        pieces = forward.tensors[end - self._counts[shard] : end]
        absent = tuple(index for index, piece in enumerate(pieces) if piece is None)
        versions, about = self._versions[shard], forward.settings
        header = ForwardHeader(self.run, forward.number, versions, forward.lr, forward.parts, absent, about)
        given = [piece for piece in pieces if piece is not None]
        self._mailbox.start_send(self._spec.settings.shards[shard], Tag.FORWARD, vars(header), given)

    def _answer(self, release: Release) -> None:
        """Without waiting: a worker that is gone, or slow to listen, holds up nobody."""
        header = {"run": self.run, "version": self._versions[0], "step": release.step, "stop": release.stop}
        self._mailbox.start_send(release.rank, Tag.WEIGHTS, header, self._weights)

    def end(self, summary: Summary) -> None:
        self._journal.end(summary)


@final
class _Host:
    """The loop that receives messages, and hands each to the training that it is of."""

    def __init__(self, mailbox: AbstractMailbox, spec: HostSpec) -> None:
        self._mailbox = mailbox
        self._spec = spec
        self._coordinator = Coordinator(spec.ranks)
        self._run: HostRun | None = None
        self._is_restored = spec.begun is not None and spec.begun.exists()

    def serve(self) -> Summary:
        self._mailbox.follow_peers()
        if self._is_restored:
            self._coordinator.gone = find_missing(self._mailbox, self._spec.ranks)
        try:
            while self._coordinator.has_ranks:
                self._take_turn()
        finally:
            summary = self._end_run()
        return summary

    def _take_turn(self) -> None:
        """All messages that are there, before anything sets out: ranks that push together stay together."""
        message: Message | None = self._mailbox.receive()
        while message is not None:
            self._admit(message)
            message = self._mailbox.poll()
        if self._run is not None:
            self._run.move_on()

    def _admit(self, message: Message) -> None:
        is_own, is_shard = message.source in self._spec.ranks, message.source in self._spec.settings.shards
        gone = self._coordinator.gone
        if message.tag in (JOINED, LEFT):
            if is_own:
                (gone.add if message.tag == LEFT else gone.discard)(message.source)
            elif is_shard and message.tag == JOINED and self._run is not None:
                self._run.ask_again(message.source)
        elif is_own or is_shard:
            self._coordinator.admit(message, self._handle)
        else:
            self._coordinator.refused["unknown rank"] += 1

    def _handle(self, message: Message) -> None:
        number, is_shard = read_int(message.header, "run"), message.source in self._spec.settings.shards
        refused = self._coordinator.refused
        if message.tag == Tag.PUSH and not is_shard and (self._run is None or number > self._run.run):
            self._begin(number, message)
        run, is_new = self._run, True
        if run is None or number != run.run:
            refused["late"] += 1
        elif message.tag == Tag.PUSH and not is_shard:
            is_new = run.take_push(message.source, PushHeader.read(message.header), message.tensors)
        elif message.tag == Tag.WEIGHTS and is_shard:
            is_new = run.take_answer(message)
        else:
            refused["unknown tag"] += 1
        if not is_new:
            refused["duplicate"] += 1

    def _begin(self, number: int, message: Message) -> None:
        """A push may be of a training that is new here."""
        seed, counts = read_int(message.header, "seed"), read_ints(message.header, "counts")
        if len(counts) != self._spec.settings.num_shards:
            raise MalformedError("counts")
        buckets = () if self._spec.settings.make_codec().is_exact else read_layout(message.header)
        if len(buckets) not in (0, sum(counts)):
            raise MalformedError("layout")
        self._end_run()
        if self._spec.begun is not None:
            self._spec.begun.touch()
        self._run = HostRun(
            self._mailbox,
            spec=self._spec,
            run=number,
            counts=counts,
            buckets=buckets,
            policy=self._spec.make_policy(seed),
            journal=self._open_journal(seed),
        )

    def _open_journal(self, seed: int) -> Journal:
        spec = self._spec
        about = {"plan": spec.plan, "workers": spec.settings.num_workers, "host": spec.host, "seed": seed}
        path, clock = spec.run and journal_file(spec.run, seed, f"host-{spec.host}"), self._mailbox.clock.now
        restored, self._is_restored = 0 if self._is_restored else None, False
        return Journal(path, about, restored=restored, flush_seconds=FLUSH_SECONDS, clock=clock)

    def _end_run(self) -> Summary:
        num_forwards = self._run.num_forwards if self._run else 0
        summary = Summary(updates=num_forwards, refused=self._coordinator.refusals(self._mailbox))
        if self._run is not None:
            self._run.end(summary)
        return summary


def join(number: int, pushes: Sequence[Push], given: Sequence[tuple[PushHeader, Pieces]]) -> Forward:
    """The mean of what waits, weighted by shares of the batch, which counts by their sum. One alone is as it came."""
    shares = [header.weight for header, _ in given]
    whole = sum(shares)
    factors = [share / whole if whole else 1 / len(given) for share in shares]
    total = weighted_sum([pieces for _, pieces in given], factors)
    parts = tuple((rank, step, share) for (rank, step), share in zip(pushes, shares, strict=True))
    first = given[0][0]
    return Forward(number, parts, first.lr, tuple(total), first.settings)
