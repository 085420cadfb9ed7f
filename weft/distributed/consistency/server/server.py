"""A server: the loop that receives the messages of a shard, and hands each to the training that it is of."""

import math
from typing import final

from weft.distributed.consistency.control import (
    FLUSH_SECONDS,
    Coordinator,
    Journal,
    MalformedError,
    find_missing,
    journal_file,
    read_int,
)
from weft.distributed.consistency.server.decisions import Summary
from weft.distributed.consistency.server.protocol import InitHeader, Tag
from weft.distributed.consistency.server.shard_run import ShardRun
from weft.distributed.consistency.server.shard_state import ServerSpec, ShardState
from weft.distributed.consistency.server.snapshot import read_snapshot
from weft.distributed.mailbox import JOINED, LEFT, AbstractMailbox, Message
from weft.errors import DeadlineError

__all__ = ["serve"]


def serve(mailbox: AbstractMailbox, spec: ServerSpec) -> Summary:
    """Serve the workers until all have left; what was done in the last training."""
    return _Server(mailbox, spec).serve()


@final
class _Server:
    def __init__(self, mailbox: AbstractMailbox, spec: ServerSpec) -> None:
        self._mailbox = mailbox
        self._spec = spec
        self._coordinator = Coordinator(range(spec.settings.num_workers))
        self._run: ShardRun | None = None

    def serve(self) -> Summary:
        self._mailbox.follow_peers()
        self._restore()
        try:
            while self._coordinator.has_ranks:
                self._take_turn()
        finally:
            summary = self._end_run()
        return summary

    # Messages.

    def _take_turn(self) -> None:
        alarm = self._run.policy.alarm() if self._run else math.inf
        try:
            message = self._mailbox.receive(deadline=alarm)
        except DeadlineError:
            assert self._run is not None, "nothing rings before a training"
            self._run.ring()
            return
        if message.tag == LEFT:
            self._lose(message.source)
        elif message.tag != JOINED and not self._is_from_peer(message):
            self._coordinator.refused["unknown rank"] += 1
        elif message.tag != JOINED:
            self._coordinator.admit(message, self._handle)

    def _is_from_peer(self, message: Message) -> bool:
        match message.tag:
            case Tag.FORWARD:
                return message.source in self._spec.settings.hosts
            case Tag.NORMS:
                return message.source in self._spec.settings.shards
            case _:
                return message.source in self._coordinator.ranks

    def _handle(self, message: Message) -> None:
        coordinator, run = self._coordinator, self._run
        is_greeting = message.tag == Tag.HELLO
        if message.tag == Tag.INIT:
            self._begin(message)
        elif run is None or (is_greeting and read_int(message.header, "run") > coordinator.run):
            coordinator.put_off(message)
        elif is_greeting:
            run.greet(message)
        elif message.header.get("run") != coordinator.run:
            coordinator.refused["late"] += 1
        else:
            run.handle(message)

    def _lose(self, address: int) -> None:
        if address in self._spec.settings.shards and self._run is not None:
            self._run.lose_shard(address)
        elif address in self._coordinator.ranks:
            if self._run is not None:
                self._run.lose(address)
            self._coordinator.gone.add(address)

    # Beginning and end.

    def _begin(self, message: Message) -> None:
        header = InitHeader.read(message.header)
        num_weights = header.num_pieces + len(header.slots)
        if message.source != 0 or len(message.tensors) != num_weights + header.num_buffers:
            raise MalformedError("tensors")
        if self._run is not None and header.run == self._coordinator.run:
            self._coordinator.refused["duplicate"] += 1
            return
        self._end_run()
        weights, slots = message.tensors[: header.num_pieces], message.tensors[header.num_pieces : num_weights]
        state = ShardState(self._mailbox, self._spec, header, weights, message.tensors[num_weights:])
        state.begin(slots)
        early = self._coordinator.begin(header.run)
        self._run = run = self._make_run(state)
        for rank in sorted(self._coordinator.gone):  # who was lost before is not waited for now
            run.lose(rank)
        for greeting in early:
            self._coordinator.admit(greeting, self._handle)

    def _restore(self) -> None:
        """Go on where a server of the same shard was, if there has been one."""
        found = read_snapshot(self._spec.snapshot) if self._spec.snapshot is not None else None
        if found is None:
            return
        state = ShardState(self._mailbox, self._spec, found.header, found.weights, found.buffers)
        state.restore(found)
        self._coordinator.begin(found.header.run)
        self._run = self._make_run(state, restored_at=found.version)
        self._coordinator.gone = find_missing(self._mailbox, self._coordinator.ranks)

    def _make_run(self, state: ShardState, restored_at: int | None = None) -> ShardRun:
        spec, seed, updates = self._spec, state.header.seed, state.header.updates
        journal = Journal(
            spec.run and journal_file(spec.run, seed, f"shard-{spec.shard}"),
            {"plan": spec.plan, "workers": spec.settings.num_workers, "shard": spec.shard, "seed": seed}
            | {"updates": updates},
            restored=restored_at,
            flush_seconds=FLUSH_SECONDS,
            clock=self._mailbox.clock.now,
        )
        return ShardRun(
            self._mailbox,
            spec=spec,
            state=state,
            coordinator=self._coordinator,
            policy=spec.make_policy(seed, restored_at is None),
            journal=journal,
            restored_at=restored_at,
        )

    def _end_run(self) -> Summary:
        refused = self._coordinator.refusals(self._mailbox)
        if self._run is None:
            return Summary(refused=refused)
        summary = self._run.summary(refused)
        self._run.end(summary)
        return summary
