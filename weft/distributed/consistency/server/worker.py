"""A worker of parameter servers: it waits for no other worker unless a server says so.

A replica may be several ranks, a pipeline or a group that splits layers (DistBelief). Then each part of the model has
servers of its own, and ranks of a replica take the same steps, on the same samples:

    data=2 pipeline=2 consistency=async topology=server(1)       stage 0   worker 0 --> server 0 <-- worker 1
                                                                 stage 1   worker 2 --> server 1 <-- worker 3
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, final

import torch
from torch import Tensor

from weft.distributed.codecs import entries_of, remember_entries
from weft.distributed.consistency.server.elastic_steps import ElasticSteps
from weft.distributed.consistency.server.session import Session
from weft.distributed.consistency.server.settings import Settings
from weft.distributed.consistency.server.steps import GradientSteps
from weft.distributed.group.solo import SoloGroup
from weft.distributed.mailbox import AbstractMailbox
from weft.distributed.placement.data_parallel import DataParallel
from weft.distributed.placement.inside import InsideReplica
from weft.distributed.placement.shares import MeasuredShares
from weft.graph import GradientSink, State
from weft.specs import Mesh
from weft.training.checkpoint import Entry
from weft.training.gradients import use_point
from weft.training.optimizers import OptimizerState
from weft.training.placement import AbstractPlacement, WholeModel
from weft.training.replicas import AbstractReplicas, Consensus, SoloReplicas, Traffic, Update
from weft.training.sampling import share

__all__ = ["ServedReplicas"]


@final
class ServedReplicas(AbstractReplicas):
    """One of the workers that train through servers. The ranks of replica 0, each for its part of the model, begin,
    evaluate and keep the record.

    Ranks do not meet: `gather` gives a rank's own tensor alone, so that rank 0 can write a checkpoint by itself. `sum`
    is for those who have ended their loop, and waits for all that are left. Synchronous ranks meet at shard 0: they
    sum, gather, agree and evaluate together, as those of a group do.

    Args:
        seeds: of the trainings to come, in order; what servers record is filed under them.
        on_joined: called when all servers know this worker.
        buffers: of synchronous ranks, running statistics before an evaluation: averaged ("mean"), or each rank keeps
            its own ("rank").
        shares: of synchronous ranks, where they are dealt by measured speed; by default they are equal.
        mesh: where this rank stands among all; by default it is the whole of a replica.
        inside: the ranks that hold the model together, this one among them; None for this one alone.
    """

    def __init__(
        self,
        mailbox: AbstractMailbox,
        settings: Settings,
        seeds: Sequence[int],
        on_joined: Callable[[], None] = lambda: None,
        *,
        buffers: Literal["mean", "rank"] = "mean",
        shares: MeasuredShares | None = None,
        mesh: Mesh | None = None,
        inside: InsideReplica | None = None,
    ) -> None:
        self._mailbox = mailbox
        self._mesh = mesh or Mesh(mailbox.address, data=settings.num_workers)
        self._placement = inside.placement if inside else WholeModel()
        self._inside = inside
        self._settings = settings
        self._on_joined = on_joined
        self._buffers = buffers
        self._shares = shares
        self._num_samples = 0  # of the share that was taken last
        self._session = Session(mailbox, settings, seeds, inside)
        make_steps = ElasticSteps if settings.form == "weights" else GradientSteps
        self._steps: ElasticSteps | GradientSteps = make_steps(self._session, settings)

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def shares(self) -> MeasuredShares | None:
        """Of a batch, where they are dealt by measured speed."""
        return self._shares

    @property
    def placement(self) -> AbstractPlacement:
        return self._placement

    @property
    def is_synchronous(self) -> bool:
        return self._settings.is_synchronous

    def join(self, model: State) -> None:
        self._session.join(model)
        self._on_joined()
        self._steps.start()
        if self._shares is not None:
            self._shares.begin()

    @property
    def told(self) -> Mapping[str, Tensor]:
        """The parameters, or parts of them, that this rank tells its servers of."""
        return self._session.parameters

    # Steps.

    def next_step(self, step: int) -> int:
        return self._settings.batch_of(self._steps.number)

    def share(self, indices: Tensor) -> Tensor:
        if self._shares is not None:
            own = indices[self._shares.span(len(indices))]
            self._num_samples = len(own)
            return own
        return share(indices, self._settings.share_of(self.mesh.replica, self._steps.number), self.mesh.num_replicas)

    def begin(self, weight: float) -> GradientSink:
        if self._shares is not None and self._num_samples:  # a script takes its share elsewhere
            self._shares.start(self._num_samples)
        sink = self._steps.begin(weight)
        return sink if self._inside is None else self._inside.begin(sink)

    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        if self._shares is not None:
            self._shares.stop()
        if self._inside is not None:
            self._inside.finish(update.parameters)
            loss = self._inside.total(loss)  # one of them has it, and the servers of each part hear it
        found = self._steps.finish(loss, update)
        self._session.hand_round()
        if self._shares is not None:
            self._shares.end_step(self.gather)
        return found

    def traffic(self) -> Traffic:
        return self._steps.traffic

    # Decisions, and the end.

    def agree_to_save(self, wish: bool) -> bool:
        """It is that of replica 0 alone, where ranks do not meet."""
        return self._any(wish) if self.is_synchronous else self._wishes(wish)

    def agree_to_stop(self, wish: bool) -> bool:
        """Through shard 0."""
        if self.is_synchronous:
            return self._any(wish)
        if self._wishes(wish) and not self._session.is_stopped:
            self._session.stop()
        return self._session.is_stopped

    def _wishes(self, wish: bool) -> bool:
        """Whether a rank of this replica does."""
        return wish if self._inside is None else self._inside.total(float(wish)) > 0

    def _any(self, wish: bool) -> bool:
        return bool(self.sum(torch.tensor([float(wish)])).item())

    def dismiss(self) -> None:
        """Synchronous ranks all evaluate, so all know."""
        if not self.is_synchronous:
            self._session.stop()

    def sum(self, tensor: Tensor) -> Tensor:
        """Of every part over its ranks, and then over the parts."""
        total = self._session.sum(tensor)
        if self._inside is not None:
            self._inside.group.all_reduce(total)
        return total

    def gather(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Of all ranks in their order, or, where ranks do not meet, of this replica's."""
        own = self._session.gather(tensor) if self.is_synchronous else (tensor,)
        if self._inside is None:
            return own
        parts = tensor.new_empty((self._inside.group.size, len(own), *tensor.shape))
        self._inside.group.all_gather(parts, torch.stack(own).unsqueeze(0))
        if not self.is_synchronous:
            return tuple(parts[:, 0])
        meshes = [self._mesh.seen_by(rank) for rank in range(self._mesh.num_ranks)]
        return tuple(parts[mesh.part, mesh.replica] for mesh in meshes)

    @contextmanager
    def use_consensus(self, model: State) -> Iterator[Consensus]:
        """Replica 0 judges the weights, or the centre, that it was last sent; when all have ended, every rank takes the
        last there are. Synchronous ranks judge together."""
        if self.is_synchronous:
            self._average_statistics(model.buffers if self._buffers == "mean" else {})
            whole = self._fetch_whole()
            with use_point(model.parameters, {**model.parameters, **whole} if whole else model.parameters):
                yield Consensus(self)
            return
        values: dict[str, float] = {}
        series: dict[str, tuple[float, ...]] = {}
        session = self._session
        if session.has_ended:
            summary = session.take_last_weights()
            session.hand_round()
            values = {"staleness": summary.mean_staleness, "dropped_gradients": float(summary.dropped)}
            happened = {"lost_updates": summary.lost, "returned_ranks": summary.returned}
            values |= {name: float(count) for name, count in happened.items() if count}
            series = {"staleness": tuple(map(float, summary.staleness))}
        with use_point(model.parameters, {**model.parameters, **session.centre()}):
            yield Consensus(self._judges() if self.mesh.replica == 0 else None, values, series)

    def _judges(self) -> AbstractReplicas:
        """The ranks of this replica, by themselves."""
        if self._inside is None:
            return SoloReplicas()
        mesh, group = self._mesh, self._inside.group
        alone = Mesh(group.rank, pipeline=mesh.pipeline, tensor=mesh.tensor, stages=mesh.stages)
        return DataParallel(SoloGroup(clock=group.clock), world=group, mesh=alone, placement=self._placement)

    @torch.no_grad()
    def _average_statistics(self, buffers: Mapping[str, Tensor]) -> None:
        """Buffers become their mean over ranks; counters, which are whole numbers, become rank 0's."""
        for buffer in buffers.values():
            if buffer.is_floating_point():
                buffer.copy_(self._session.sum(buffer) / self.mesh.num_replicas)
            else:
                buffer.copy_(self._session.gather(buffer)[0])

    # Checkpoints.

    def collect(self, state: OptimizerState) -> OptimizerState:
        """The state that the servers keep, on every rank that meets the others, else on replica 0, which writes it; a
        rank that updates by itself has its own."""
        is_asking = self.is_synchronous or self.mesh.replica == 0
        return self._session.fetch_state(state) if self._settings.form == "gradient" and is_asking else state

    def fetch_state(self, state: OptimizerState) -> OptimizerState:
        """That which the servers keep, in place of this rank's, at any moment and on any rank."""
        return self._session.fetch_state(state) if self._settings.form == "gradient" else state

    def fetch_weights(self) -> Mapping[str, Tensor] | None:
        """The weights as the servers hold them, at any moment and on any rank; None where the rank has just these."""
        if self.is_synchronous and self._session.has_exact_weights:
            return None
        return self._session.fetch_weights()

    def memory(self) -> Mapping[str, Entry]:
        """The centre, in place of rank 0's own weights, or the weights of which ranks are sent less than all digits:
        with any plan a run goes on from them. Of ranks that meet, what they have not sent."""
        found = self._fetch_whole() or self._session.centre()
        names = {f"parameter/{name}": tensor for name, tensor in found.items()}
        entries = {name: Entry(tensor, cut=self._placement.cut_of(name)) for name, tensor in names.items()}
        if self.is_synchronous:  # else no moment has weights and all that ranks have not sent of one step
            entries |= entries_of(self._session.codec, self.told, self._placement.cut_of)
        return entries | (self._shares.memory() if self._shares is not None else {})

    def _fetch_whole(self) -> dict[str, Tensor]:
        """The weights as the servers hold them, on every rank that meets the others, else on replica 0; nothing where
        ranks have them anyway."""
        if self._session.has_exact_weights or not (self.is_synchronous or self.mesh.replica == 0):
            return {}
        return self._session.fetch_weights()

    def remember(self, step: int, entries: Mapping[str, Entry]) -> None:
        """Rank 0 begins again, from the weights and the optimizer state of the checkpoint; so do the servers."""
        slots: dict[str, dict[str, Tensor]] = {}
        if self._settings.form == "gradient":
            for key, entry in entries.items():
                if key.startswith("slot/"):
                    name, _, slot = key.removeprefix("slot/").rpartition("/")
                    slots.setdefault(name, {})[slot] = entry.tensor
        remember_entries(self._session.codec, entries if self.is_synchronous else {})
        self._session.begin_again(step, slots, int(entries["optimizer/step"].tensor))
        self._steps.start()
        if self._shares is not None:
            self._shares.remember(step, entries)
