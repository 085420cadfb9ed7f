"""A worker of parameter servers: it waits for no other worker unless a server says so."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, final

import torch
from torch import Tensor

from weft.distributed.consistency.server.elastic_steps import ElasticSteps
from weft.distributed.consistency.server.session import Session
from weft.distributed.consistency.server.settings import Settings
from weft.distributed.consistency.server.steps import GradientSteps
from weft.distributed.mailbox import AbstractMailbox
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
    """One of the workers that train through servers. Rank 0 begins, evaluates and keeps the record.

    Ranks do not meet: `gather` gives a rank's own tensor alone, so that rank 0 can write a checkpoint by itself. `sum`
    is for those who have ended their loop, and waits for all that are left. Synchronous ranks meet at shard 0: they
    sum, gather, agree and evaluate together, as those of a group do.

    Args:
        seeds: of the trainings to come, in order; what servers record is filed under them.
        on_joined: called when all servers know this worker.
        buffers: of synchronous ranks, running statistics before an evaluation: averaged ("mean"), or each rank keeps
            its own ("rank").
    """

    def __init__(
        self,
        mailbox: AbstractMailbox,
        settings: Settings,
        seeds: Sequence[int],
        on_joined: Callable[[], None] = lambda: None,
        *,
        buffers: Literal["mean", "rank"] = "mean",
    ) -> None:
        self._mailbox = mailbox
        self._settings = settings
        self._on_joined = on_joined
        self._buffers = buffers
        self._session = Session(mailbox, settings, seeds)
        make_steps = ElasticSteps if settings.form == "weights" else GradientSteps
        self._steps: ElasticSteps | GradientSteps = make_steps(self._session, settings)

    @property
    def mesh(self) -> Mesh:
        return Mesh(self._mailbox.address, data=self._settings.num_workers)

    @property
    def placement(self) -> AbstractPlacement:
        return WholeModel()

    @property
    def is_synchronous(self) -> bool:
        return self._settings.is_synchronous

    def join(self, model: State) -> None:
        self._session.join(model)
        self._on_joined()
        self._steps.start()

    # Steps.

    def next_step(self, step: int) -> int:
        return self._settings.batch_of(self._steps.number)

    def share(self, indices: Tensor) -> Tensor:
        return share(indices, self._settings.share_of(self.mesh.replica, self._steps.number), self.mesh.num_replicas)

    def begin(self, weight: float) -> GradientSink:
        return self._steps.begin(weight)

    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        return self._steps.finish(loss, update)

    def traffic(self) -> Traffic:
        return self._steps.traffic

    # Decisions, and the end.

    def agree_to_save(self, wish: bool) -> bool:
        """It is rank 0's alone, where ranks do not meet."""
        return self._any(wish) if self.is_synchronous else wish

    def agree_to_stop(self, wish: bool) -> bool:
        """Through shard 0."""
        if self.is_synchronous:
            return self._any(wish)
        if wish and not self._session.is_stopped:
            self._session.stop()
        return self._session.is_stopped

    def _any(self, wish: bool) -> bool:
        return bool(self.sum(torch.tensor([float(wish)])).item())

    def dismiss(self) -> None:
        """Synchronous ranks all evaluate, so all know."""
        if not self.is_synchronous:
            self._session.stop()

    def sum(self, tensor: Tensor) -> Tensor:
        return self._session.sum(tensor)

    def gather(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return self._session.gather(tensor) if self.is_synchronous else (tensor,)

    @contextmanager
    def use_consensus(self, model: State) -> Iterator[Consensus]:
        """Rank 0 judges the weights, or the centre, that it was last sent; when all have ended, every rank takes the
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
            values = {"staleness": summary.mean_staleness, "dropped_gradients": float(summary.dropped)}
            happened = {"lost_updates": summary.lost, "returned_ranks": summary.returned}
            values |= {name: float(count) for name, count in happened.items() if count}
            series = {"staleness": tuple(map(float, summary.staleness))}
        agreed = model.parameters if session.places is session.parameters else {**model.parameters, **session.places}
        with use_point(model.parameters, agreed):
            yield Consensus(SoloReplicas() if self.mesh.rank == 0 else None, values, series)

    @torch.no_grad()
    def _average_statistics(self, buffers: Mapping[str, Tensor]) -> None:
        """Buffers become their mean over ranks; counters, which are whole numbers, become rank 0's."""
        for buffer in buffers.values():
            if buffer.is_floating_point():
                buffer.copy_(self.sum(buffer) / self.mesh.num_replicas)
            else:
                buffer.copy_(self.gather(buffer)[0])

    # Checkpoints.

    def collect(self, state: OptimizerState) -> OptimizerState:
        """The state that the servers keep, on every rank that meets the others, else on rank 0, which writes it; a rank
        that updates by itself has its own."""
        is_asking = self.is_synchronous or self.mesh.rank == 0
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
        with any plan a run goes on from them."""
        session = self._session
        found = self._fetch_whole() or ({} if session.places is session.parameters else session.places)
        return {f"parameter/{name}": Entry(tensor) for name, tensor in found.items()}

    def _fetch_whole(self) -> dict[str, Tensor]:
        """The weights as the servers hold them, on every rank that meets the others, else on rank 0; nothing where
        ranks have them anyway."""
        if self._session.has_exact_weights or not (self.is_synchronous or self.mesh.rank == 0):
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
        self._session.begin_again(step, slots, int(entries["optimizer/step"].tensor))
        self._steps.start()
