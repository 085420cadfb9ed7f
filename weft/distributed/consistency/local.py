"""Local SGD: ranks train alone for some steps, then take the mean of their weights.

rank 0   step step step step |      | step ...       SparkNet (Moritz et al., 2016), Stich (2019); with an outer
rank 1   step step step step | mean | step ...       optimizer DiLoCo (Douillard et al., 2023); begun after some
rank 2   step step step step |      | step ...       synchronous steps post-local SGD (Lin et al., 2020)
                              meeting
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from weft.distributed.consistency.parcel import Parcel, write
from weft.distributed.consistency.scheme import AbstractScheme, Memory
from weft.distributed.group.calls import AllReduce
from weft.distributed.group.group import AbstractGroup
from weft.specs.plan import Choice
from weft.training.checkpoint import Entry
from weft.training.layout import PER_RANK, REPLICATED
from weft.training.optimizers import Nesterov, Optimizer, OptimizerState, slots_beside
from weft.training.replicas import Traffic

__all__ = ["LocalAveraging", "OuterOptimizer", "make_local"]


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
class LocalAveraging(AbstractScheme):
    """The mean of the weights at every meeting. Ranks count by their shares of the batches since the last one, which
    differ where a batch is ragged.

    Args:
        steps: from one meeting to the next.
        averages_state: whether the optimizer's slots (velocity, moments) become their mean too; else each rank keeps
            its own.
        outer: what becomes of the mean; None takes it as it is.
    """

    def __init__(
        self, group: AbstractGroup, *, steps: int, averages_state: bool = False, outer: OuterOptimizer | None = None
    ) -> None:
        self._group = group
        self._steps = steps
        self._averages_state = averages_state
        self._outer = outer
        self._parameters: Mapping[str, Tensor] = {}
        self._weights: Parcel | None = None
        self._slots: Parcel | None = None
        self._is_meeting = False
        self._round = torch.zeros(2, dtype=torch.float64)  # the sum of this rank's shares, and their number
        self._traffic = Traffic()

    @property
    def period(self) -> int:
        return self._steps

    def join(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._weights = Parcel(self._group, parameters)

    def begin_together(self) -> None:
        self._round.zero_()
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
        mean = self._mean(self._parcel, self._parameters)
        write(self._parameters, self._outer.update(mean) if self._outer else mean)
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
        memory = {"local/round": (PER_RANK, self._round)}
        if self._outer is not None:
            for name, anchor in self._outer.anchor.items():
                memory[f"local/anchor/{name}"] = REPLICATED, anchor
                memory[f"local/velocity/{name}"] = REPLICATED, self._outer.state.slots[name]["velocity"]
        return memory

    def remember(self, entries: Mapping[str, Entry]) -> None:
        self.begin_together()
        own = entries.get("local/round")
        if own is not None and len(own.parts) == self._group.size:
            self._round.copy_(own.parts[self._group.rank])
        if self._outer is not None and all(f"local/anchor/{name}" in entries for name in self._parameters):
            names = self._parameters
            write(self._outer.anchor, {name: entries[f"local/anchor/{name}"].parts[0] for name in names})
            velocities = {
                name: slots_beside(anchor, {"velocity": entries[f"local/velocity/{name}"].parts[0]})
                for name, anchor in self._outer.anchor.items()
            }
            self._outer.state = replace(self._outer.state, slots=velocities)

    @property
    def _parcel(self) -> Parcel:
        assert self._weights is not None, "join() comes first"
        return self._weights

    def _mean(self, parcel: Parcel, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The mean over ranks, each weighed by its share of the steps since the last meeting."""
        total, count = self._round.tolist()
        parcel.pack(tensors, total / count)
        parcel.start(AllReduce)
        cost = parcel.wait()
        self._traffic = Traffic(self._traffic.exposed + cost.exposed, 0.0, self._traffic.num_bytes + cost.num_bytes)
        return parcel.tensors

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


def make_local(group: AbstractGroup, choice: Choice) -> LocalAveraging:
    """The scheme of `local(...)` in a plan."""
    outer = None
    if choice["outer"] == "nesterov":
        outer = OuterOptimizer(lr=float(choice["outer_lr"]), momentum=float(choice["outer_momentum"]))
    return LocalAveraging(group, steps=int(choice["steps"]), averages_state=choice["state"] == "mean", outer=outer)
