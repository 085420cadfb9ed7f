"""Local SGD: ranks train alone for some steps, then take the mean of their weights.

rank 0   step step step step |      | step ...       SparkNet (Moritz et al., 2016), Stich (2019); with an outer
rank 1   step step step step | mean | step ...       optimizer DiLoCo (Douillard et al., 2023); begun after some
rank 2   step step step step |      | step ...       synchronous steps post-local SGD (Lin et al., 2020)
                              meeting

With a codec what is sent is how far each has come since the last common weights a, which all hold to the same bits, and
the mean is a + q(sum_r q(c_r (x_r - a))): rounded weights would lose the small steps between two meetings. What a codec
keeps back of a difference is in its memory alone, as the rank goes on from the mean: nothing is sent twice.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs import AbstractCodec, ExactCodec, write
from weft.distributed.consistency.parcel import Parcel
from weft.distributed.consistency.scheme import AbstractGroupScheme, Memory, memory_of, remember_codec
from weft.distributed.group.calls import AllReduce
from weft.distributed.group.group import AbstractGroup
from weft.specs.plan import Choice
from weft.training.checkpoint import Entry, Kind
from weft.training.optimizers import Nesterov, Optimizer, OptimizerState, slots_beside
from weft.training.replicas import Traffic

__all__ = ["LocalAveraging", "OuterOptimizer", "make_local"]

ROUNDING = 1e-9
"""By which shares of whole batches may miss 1."""


def factor_of(own: float, shares: float, size: int) -> float:
    """With which a rank counts in a mean, by its own share and the sum of all; where none has any, all count the same.

    >>> factor_of(0.25, 1.0, 3), factor_of(0.25, 0.5, 3), factor_of(0.0, 0.0, 4)
    (0.25, 0.5, 0.25)
    """
    if not shares:
        return 1.0 / size
    return own if abs(shares - 1.0) < ROUNDING else own / shares


@final
class OuterOptimizer:
    """An update of the weights of the last meeting, for which what the ranks moved since then is the gradient.

    delta <- anchor - mean;  velocity <- momentum velocity + delta;  anchor <- anchor - lr (delta + momentum velocity)
    """

    def __init__(self, *, lr: float = 0.7, momentum: float = 0.9) -> None:
        self._optimizer = Optimizer(Nesterov(momentum), lr=lr)
        self.anchor: dict[str, Tensor] = {}
        self.state = self._optimizer.init({})

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        self.anchor = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        self.state = self._optimizer.init(self.anchor)

    def update(self, mean: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The new anchor, from which all ranks go on."""
        delta = {name: anchor - mean[name] for name, anchor in self.anchor.items()}
        self.state = self._optimizer.update(delta, self.anchor, self.state, self._optimizer.lr)
        return self.anchor


@final
class LocalAveraging(AbstractGroupScheme):
    """The mean of the weights at every meeting. Ranks count by their shares of the batches since the last one, which
    differ where a batch is ragged.

    Args:
        steps: from one meeting to the next.
        averages_state: whether the optimizer's slots (velocity, moments) become their mean too; else each rank keeps
            its own.
        outer: what becomes of the mean; None takes it as it is.
        codec: what is sent instead of differences of weights; the optimizer's state is sent as it is.
    """

    def __init__(
        self,
        group: AbstractGroup,
        *,
        steps: int,
        averages_state: bool = False,
        outer: OuterOptimizer | None = None,
        codec: AbstractCodec | None = None,
    ) -> None:
        self._group = group
        self._codec = codec or ExactCodec()
        self._common: dict[str, Tensor] = {}  # the weights of the last meeting, where differences from them are sent
        self._steps = steps
        self._averages_state = averages_state
        self._outer = outer
        self._parameters: Mapping[str, Tensor] = {}
        self._weights: Parcel | None = None
        self._slots: Parcel | None = None
        self._is_meeting = False
        self._round = torch.zeros(2, dtype=torch.float64)  # the sum of this rank's shares, and their number
        self.adds_up_shares = False
        """Whether ranks ask what their shares sum to: those of a script may sum to less than 1, where a step comes
        without a backward, or no item of a batch counts."""
        self._traffic = Traffic()

    @property
    def period(self) -> int:
        return self._steps

    def join(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._codec.remember({})
        self._weights = Parcel(self._group, parameters, self._codec)

    def begin_together(self) -> None:
        self._round.zero_()
        if not self._codec.is_exact:
            self._common = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        if self._outer is not None:
            self._outer.begin(self._parameters)

    def begin(self, step: int, weight: float) -> None:
        self._is_meeting = (step + 1) % self._steps == 0
        self._round += torch.tensor([weight, 1.0], dtype=torch.float64)

    def advance(self) -> None:
        pass

    def before_update(self) -> None:
        pass

    def after_update(self, state: OptimizerState) -> OptimizerState:
        self._traffic = Traffic()
        if not self._is_meeting:
            return state
        mean = self._mean(self._parcel, self._parameters) if self._codec.is_exact else self._mean_of_differences()
        write(self._parameters, self._outer.update(mean) if self._outer else mean)
        write(self._common, {name: self._parameters[name] for name in self._common})
        if self._averages_state:
            state = self._average(state)
        self._round.zero_()
        return state

    def consensus(self) -> Mapping[str, Tensor] | None:
        """The mean of where the ranks are now; nobody moves there."""
        return self._mean(self._parcel, self._parameters) if self._round[1] else None

    def traffic(self) -> Traffic:
        return self._traffic

    def memory(self) -> Memory:
        memory: dict[str, tuple[Kind, Tensor]] = {
            "local/round": ("own", self._round),
            **memory_of(self._codec, "local"),
        }
        if self._outer is None:  # else they are its anchor
            memory |= {f"local/common/{name}": ("global", common) for name, common in self._common.items()}
        else:
            for name, anchor in self._outer.anchor.items():
                memory[f"local/anchor/{name}"] = "global", anchor
                memory[f"local/velocity/{name}"] = "global", self._outer.state.slots[name]["velocity"]
        return memory

    def remember(self, entries: Mapping[str, Entry]) -> None:
        self.begin_together()
        remember_codec(self._codec, "local", entries, self._parameters)
        own = entries.get("local/round")
        if own is not None:
            self._round.copy_(own.tensor)
        if self._outer is not None and all(f"local/anchor/{name}" in entries for name in self._parameters):
            names = self._parameters
            write(self._outer.anchor, {name: entries[f"local/anchor/{name}"].tensor for name in names})
            velocities = {
                name: slots_beside(anchor, {"velocity": entries[f"local/velocity/{name}"].tensor})
                for name, anchor in self._outer.anchor.items()
            }
            self._outer.state = replace(self._outer.state, slots=velocities)
        if self._common:
            self._remember_common(entries)

    def _remember_common(self, entries: Mapping[str, Entry]) -> None:
        """The weights of the last meeting. Checkpoints of ranks that sent weights as they are do not hold them: saved
        between two meetings, differences begin from the mean."""
        kept = {name: f"local/common/{name}" for name in self._common}
        if self._outer is not None:
            write(self._common, self._outer.anchor)
        elif all(entry in entries for entry in kept.values()):
            write(self._common, {name: entries[entry].tensor for name, entry in kept.items()})
        elif self._round[1]:
            write(self._common, self._mean(self._parcel, self._parameters))

    @property
    def _parcel(self) -> Parcel:
        assert self._weights is not None, "join() comes first"
        return self._weights

    @torch.no_grad()
    def _mean_of_differences(self) -> Mapping[str, Tensor]:
        """The common weights, and on top of them what a codec leaves of how far the ranks have come."""
        moved = {name: parameter - self._common[name] for name, parameter in self._parameters.items()}
        self._parcel.pack(moved, self._factor())
        self._parcel.reduce()
        self._count(self._parcel.wait())
        return {name: common + self._parcel.tensors[name] for name, common in self._common.items()}

    def _mean(self, parcel: Parcel, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The mean over ranks, each weighed by its share of the steps since the last meeting."""
        parcel.pack(tensors, self._factor())
        parcel.start(AllReduce)
        self._count(parcel.wait())
        return parcel.tensors

    def _factor(self) -> float:
        """Of this rank's weights in the mean: its part of all shares since the last meeting. A collective call where
        shares are added up; those that sum to 1 are taken as they are, to the bit."""
        total, count = self._round.tolist()
        own = float(total / count)
        if not self.adds_up_shares:
            return own
        shares = torch.tensor([own], dtype=torch.float64)
        self._group.all_reduce(shares)
        return factor_of(own, shares.item(), self._group.size)

    def _count(self, cost: Traffic) -> None:
        self._traffic = self._traffic.plus(replace(cost, hidden=0.0))

    def _average(self, state: OptimizerState) -> OptimizerState:
        """Slots that are numbers to add become their mean; counters are the same on all ranks."""
        own = {
            f"{name}/{slot}": slots[slot]
            for name, slots in state.slots.items()
            for slot in sorted(slots)
            if slots[slot].is_floating_point()
        }
        if not own:
            return state
        if self._slots is None:
            self._slots = Parcel(self._group, own)
        mean = self._mean(self._slots, own)
        slots = {
            name: {slot: mean.get(f"{name}/{slot}", tensor).clone() for slot, tensor in found.items()}
            for name, found in state.slots.items()
        }
        return replace(state, slots=slots)


def make_local(group: AbstractGroup, choice: Choice, codec: AbstractCodec) -> LocalAveraging:
    """The scheme of `local(...)` in a plan."""
    outer = None
    if choice["outer"] == "nesterov":
        outer = OuterOptimizer(lr=float(choice["outer_lr"]), momentum=float(choice["outer_momentum"]))
    return LocalAveraging(
        group, steps=int(choice["steps"]), averages_state=choice["state"] == "mean", outer=outer, codec=codec
    )
