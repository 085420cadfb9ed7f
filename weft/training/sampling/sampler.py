"""An order cut into global batches, with a state that says exactly where training stands."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from torch import Tensor

from weft.errors import UsageError
from weft.training.sampling.order import AbstractOrder

__all__ = ["Sampler", "SamplerState"]


@dataclass(frozen=True)
class SamplerState:
    """Where training stands: all ranks together have consumed `offset` samples of this epoch.

    The count is global, so a run may go on with another number of ranks at the very next sample.
    """

    epoch: int = 0
    offset: int = 0

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, int]) -> "SamplerState":
        return SamplerState(epoch=data["epoch"], offset=data["offset"])


class Sampler:
    """Gives out an epoch's samples, one global batch after another.

    >>> from weft.training.sampling import Ordered
    >>> sampler = Sampler(Ordered(5), batch_size=2)
    >>> sampler.next_batch(SamplerState(epoch=0, offset=4))
    (tensor([4]), SamplerState(epoch=1, offset=0))
    """

    def __init__(self, order: AbstractOrder, batch_size: int, drop_last: bool = False) -> None:
        if len(order) == 0:
            raise UsageError("data set is empty (samples: 0); give it samples")
        if batch_size < 1:
            raise UsageError(f"batch without samples (batch_size: {batch_size}); raise batch_size")
        if batch_size > len(order):
            raise UsageError(
                f"batch is larger than the data (batch_size: {batch_size}, samples: {len(order)}); lower batch_size"
            )
        self._order = order
        self._batch_size = batch_size
        self._num_samples = len(order) // batch_size * batch_size if drop_last else len(order)
        self._cached: tuple[int, Tensor] | None = None

    @property
    def batch_size(self) -> int:
        """Samples in a batch, over all ranks."""
        return self._batch_size

    @property
    def num_samples(self) -> int:
        """Samples given out per epoch."""
        return self._num_samples

    @property
    def num_batches(self) -> int:
        """Batches per epoch; the last may be short."""
        return -(-self._num_samples // self._batch_size)

    def next_batch(self, state: SamplerState) -> tuple[Tensor, SamplerState]:
        """The indices of the global batch at `state` (in epoch `state.epoch`), and the state after it."""
        if not 0 <= state.offset < self._num_samples:
            raise UsageError(
                f"no batch at this place of the epoch (offset: {state.offset}, samples: {self._num_samples}); "
                "resume with the data and batch_size of the run"
            )
        end = min(state.offset + self._batch_size, self._num_samples)
        after = SamplerState(state.epoch + 1, 0) if end == self._num_samples else SamplerState(state.epoch, end)
        return self._order_of(state.epoch)[state.offset : end], after

    def state_at(self, step: int) -> SamplerState:
        """Where training stands after so many global batches from the first."""
        epoch, batch = divmod(step, self.num_batches)
        return SamplerState(epoch, batch * self._batch_size)

    def samples_before(self, state: SamplerState) -> int:
        """Samples that were given out until then."""
        return state.epoch * self._num_samples + state.offset

    def _order_of(self, epoch: int) -> Tensor:
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, self._order.order(epoch))
        return self._cached[1]
