"""The scheme seam: what a rank does with its weights around a step of its own; and what a group asks of it besides."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from weft.distributed.codecs import AbstractCodec
from weft.training.checkpoint import Entry, Kind
from weft.training.optimizers import OptimizerState
from weft.training.replicas import Traffic

__all__ = ["AbstractGroupScheme", "AbstractScheme", "Memory", "memory_of", "remember_codec"]

Memory = Mapping[str, tuple[Kind, Tensor]]
"""The state of a scheme in a checkpoint, by name: what this rank has of it."""


class AbstractScheme(ABC):
    """One kind of relaxed consistency over one carrier. A step, as OwnSteps drives it:

    begin            before the gradient: weights may set out
    advance          a gradient is ready: messages under way move on
    before_update    weights that arrived are taken in
                     the rank's own update, with the gradient of its own share
    after_update     weights, and the optimizer's state, are brought together
    """

    @abstractmethod
    def begin(self, step: int, weight: float) -> None:
        """A step begins; `weight` is this rank's share of its batch."""

    @abstractmethod
    def advance(self) -> None: ...

    @abstractmethod
    def before_update(self) -> None: ...

    @abstractmethod
    def after_update(self, state: OptimizerState) -> OptimizerState: ...

    @abstractmethod
    def traffic(self) -> Traffic:
        """The cost of the last step's exchange."""


class AbstractGroupScheme(AbstractScheme):
    """A scheme whose ranks are a group: all take the same steps, save and stop together, and go on to the last bit.

    Steps are counted from 0, from when the scheme began. Every method is called by all ranks, in the same order.
    """

    @property
    @abstractmethod
    def period(self) -> int | None:
        """All ranks wait for each other after every so many steps; None if they never do."""

    @abstractmethod
    def join(self, parameters: Mapping[str, Tensor]) -> None:
        """The parameters that are trained: the tensors that updates write to."""

    @abstractmethod
    def begin_together(self) -> None:
        """All ranks hold the same weights: step 0 comes next."""

    @abstractmethod
    def consensus(self) -> Mapping[str, Tensor] | None:
        """The weights that all ranks together stand for, valid until the next step; None where all hold the same."""

    @abstractmethod
    def memory(self) -> Memory: ...

    @abstractmethod
    def remember(self, entries: Mapping[str, Entry]) -> None:
        """Go on with the memory in a checkpoint of the same scheme; with another's, or none, begin together."""


def memory_of(codec: AbstractCodec, scheme: str) -> Memory:
    """The memory of a scheme's codec, beside that of synchronous steps, which may have come first: it is of weights,
    the other of gradients."""
    return {f"{scheme}_codec/{key}": (kept.kind, kept.tensor) for key, kept in codec.memory().items()}


def remember_codec(
    codec: AbstractCodec, scheme: str, entries: Mapping[str, Entry], parameters: Mapping[str, Tensor]
) -> None:
    """Go on with what the codec of a scheme kept for these parameters; nothing of it begins empty."""
    prefix = f"{scheme}_codec/"
    found = {name.removeprefix(prefix): e.tensor for name, e in entries.items() if name.startswith(prefix)}
    codec.remember({key: tensor for key, tensor in found.items() if "/" not in key or key.split("/")[1] in parameters})
