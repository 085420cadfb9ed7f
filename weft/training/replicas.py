"""The replicas seam: what the loop needs of the other ranks, and the one rank that needs nobody.

A step as the loop drives it, on every rank:

    share      which samples of the global batch are this rank's
    begin      a sink for this rank's gradients; exchange starts while backward still runs
    finish     all gradients exchanged, parameters updated; the global loss
    agree_to_stop, agree_to_save      decisions that all ranks take together

Ranks that go at a pace of their own fit as well (`is_synchronous` is false): they agree when and how they can, and say
who evaluates which parameters.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, field
from typing import final

from torch import Tensor

from weft.graph import GradientSink, State
from weft.specs import Mesh
from weft.training.checkpoint import Entry
from weft.training.gradients import Norm, clip_by_norm, joint_norm
from weft.training.optimizers import AbstractOptimizer, OptimizerState, WholeNorms
from weft.training.placement import AbstractPlacement, WholeModel

__all__ = ["AbstractReplicas", "Consensus", "SoloReplicas", "Traffic", "Update"]


@dataclass(frozen=True)
class Update:
    """An update, to be applied once gradients are exchanged: of all parameters, or of pieces of them.

    Args:
        clip_norm: the largest norm of all gradients together, which `norm` knows; None for any.
        whole_norms: from norms of pieces to those of whole tensors, where parameters are pieces.
        settings: those that a script has changed in its optimizer, as text, for whoever updates in its place.
    """

    optimizer: AbstractOptimizer
    parameters: Mapping[str, Tensor]
    state: OptimizerState
    lr: float
    clip_norm: float | None
    norm: Norm = joint_norm
    whole_norms: WholeNorms | None = None
    settings: str | None = None

    def apply(self, gradients: Mapping[str, Tensor | None]) -> OptimizerState:
        if self.clip_norm is not None:
            # In the model's order, not in that of arrival: the norm of the norms has the same bits on every path.
            gradients = clip_by_norm({name: gradients.get(name) for name in self.parameters}, self.clip_norm, self.norm)
        return self.optimizer.update(gradients, self.parameters, self.state, self.lr, self.whole_norms)


@dataclass(frozen=True)
class Traffic:
    """The cost of one step's exchange for this rank."""

    exposed: float = 0.0  # seconds that the rank waited
    hidden: float = 0.0  # seconds that messages were under way while it computed
    num_bytes: int = 0  # handed to the transport
    coding: float = 0.0  # seconds of encoding, decoding and adding up
    under_way: float = 0.0  # seconds that messages were, whether the rank waited or computed
    dense_bytes: int = 0  # of the tensors that a codec encoded; 0 where there was none, or it is not known
    payload_bytes: int = 0  # that were handed to the transport instead of these
    wire_bytes: int = 0  # that left the rank for them
    activation_bytes: int = 0  # of activations and their gradients, to ranks that hold the model with this one

    def plus(self, other: "Traffic") -> "Traffic":
        """Of both, one after the other."""
        return Traffic(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Consensus:
    """The model that all ranks stand for, while a model holds it: who evaluates it together, and what is known of it.

    `judges` is None on a rank that has no part in the evaluation; such a rank hears of the end by `agree_to_stop`.
    """

    judges: "AbstractReplicas | None"
    values: Mapping[str, float] = field(default_factory=dict)  # by metric, such as `consensus_distance`
    series: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # by metric, where one number is too few


class AbstractReplicas(ABC):
    """The ranks that train one model together. Every method is called by all ranks, in the same order."""

    @property
    @abstractmethod
    def mesh(self) -> Mesh:
        """Where this rank stands among all: who takes which share of a batch, who evaluates, who writes."""

    @property
    @abstractmethod
    def placement(self) -> AbstractPlacement:
        """The part of the model that this rank holds, computes with and updates."""

    @property
    @abstractmethod
    def is_synchronous(self) -> bool:
        """Whether ranks meet in every step, and so hold the same parameters and optimizer state after it."""

    @property
    def has_one_model(self) -> bool:
        """Whether ranks, when they save, hold the same weights, or parts of the same: those that meet in every step."""
        return self.is_synchronous

    @property
    def consistency(self) -> str | None:
        """How ranks come together that each save weights of their own, as a plan spells it; None where a checkpoint
        holds one set of weights, with which all begin."""
        return None

    def adopt(self, optimizer: AbstractOptimizer) -> AbstractOptimizer:
        """The optimizer that updates are made with: without its momentum, where ranks keep that themselves.

        Raises:
            PlanError: they cannot keep that of this optimizer.
        """
        return optimizer

    @abstractmethod
    def join(self, model: State) -> None:
        """Begin together: every rank leaves with the parameters and buffers of rank 0, in place."""

    @abstractmethod
    def next_step(self, step: int) -> int:
        """The global batch that this rank takes next, where `step` follows its last: another if ranks go at a pace of
        their own and others have taken some."""

    @abstractmethod
    def share(self, indices: Tensor) -> Tensor:
        """This rank's part of a global batch."""

    @abstractmethod
    def begin(self, weight: float) -> GradientSink:
        """Start a step in which this rank's gradients count with `weight`; the weights of all ranks sum to 1."""

    @abstractmethod
    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        """Wait for the exchange and update; `loss` is this rank's, already weighted, the one returned is the sum.

        No parameter is written if the sum is not finite: every rank sees the same sum and stops. Ranks that do not meet
        in every step return the loss of their own share.
        """

    @abstractmethod
    def traffic(self) -> Traffic:
        """The cost of the last step's exchange."""

    @abstractmethod
    def agree_to_stop(self, wish: bool) -> bool:
        """Whether any rank wishes to stop, once after each step, with the same answer on all ranks.

        Ranks that do not meet in every step may hear of a wish later: it is repeated until it is granted.
        """

    @abstractmethod
    def agree_to_save(self, wish: bool) -> bool:
        """Whether a checkpoint is written after this step; as `agree_to_stop`. Ranks that never meet decide each for
        itself."""

    @abstractmethod
    def dismiss(self) -> None:
        """The target is met, and training over: ranks that had no part in the evaluation hear of it by
        `agree_to_stop`."""

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in rank order: counts, tallies, decisions. For small tensors."""

    @abstractmethod
    def gather(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """The tensor of every rank of the mesh, in rank order, on every rank; a rank's own alone where ranks do not
        meet."""

    @abstractmethod
    def collect(self, state: OptimizerState) -> OptimizerState:
        """The optimizer state that this rank saves, where others keep it for the ranks."""

    @abstractmethod
    def use_consensus(self, model: State) -> AbstractContextManager[Consensus]:
        """While it is held, `model` has the parameters that all ranks together stand for; then each has its own again.

        Buffers (running statistics) are brought together in place, and stay so.
        """

    @abstractmethod
    def memory(self) -> Mapping[str, Entry]:
        """The state that the exchange itself carries from step to step, by names of its own, for a checkpoint: what
        this rank has of it. A global entry that several ranks give must have the same bits on all of them."""

    @abstractmethod
    def remember(self, step: int, entries: Mapping[str, Entry]) -> None:
        """Go on after `step` steps, with the memory in a checkpoint's entries where there is one that fits: this rank's
        tensors. Called when the model has been restored."""


@final
class SoloReplicas(AbstractReplicas):
    """One rank: nothing is shared, exchanged or waited for."""

    def __init__(self) -> None:
        self._gradients: dict[str, Tensor | None] = {}

    @property
    def mesh(self) -> Mesh:
        return Mesh()

    @property
    def placement(self) -> AbstractPlacement:
        return WholeModel()

    @property
    def is_synchronous(self) -> bool:
        return True

    def join(self, model: State) -> None:
        pass

    def next_step(self, step: int) -> int:
        return step

    def share(self, indices: Tensor) -> Tensor:
        return indices

    def begin(self, weight: float) -> GradientSink:
        self._gradients = {}
        return self._gradients.__setitem__

    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        gradients, self._gradients = self._gradients, {}
        return loss, update.apply(gradients) if math.isfinite(loss) else update.state

    def traffic(self) -> Traffic:
        return Traffic()

    def agree_to_stop(self, wish: bool) -> bool:
        return wish

    def agree_to_save(self, wish: bool) -> bool:
        return wish

    def dismiss(self) -> None:
        pass

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor,)

    def collect(self, state: OptimizerState) -> OptimizerState:
        return state

    def use_consensus(self, model: State) -> AbstractContextManager[Consensus]:
        return nullcontext(Consensus(self))

    def memory(self) -> Mapping[str, Entry]:
        return {}

    def remember(self, step: int, entries: Mapping[str, Entry]) -> None:
        pass
