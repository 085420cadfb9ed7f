"""A consistency that Weft does not have: ranks take over rank 0's weights now and then, or keep a bound at servers.

It is what a new value of the axis brings: its implementation, its equations, and the row of the table.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import final

from torch import Tensor

from weft.distributed.codecs import AbstractCodec
from weft.distributed.consistency.parcel import Parcel
from weft.distributed.consistency.scheme import AbstractGroupScheme, Memory
from weft.distributed.consistency.server.arrival import Arrival
from weft.distributed.group.calls import Broadcast
from weft.distributed.group.group import AbstractGroup
from weft.proving.proof import clone
from weft.proving.relaxed_equations import AbstractEquations
from weft.specs.axes import Traits, Value
from weft.specs.plan import Choice
from weft.training.checkpoint import Entry
from weft.training.optimizers import OptimizerState
from weft.training.replicas import Traffic

__all__ = ["AT_SERVERS", "IN_A_GROUP", "FollowLeader", "FollowLeaderEquations", "make_policy", "make_scheme"]

HERE = "tests.distributed.consistency.follow_leader"
IN_A_GROUP = Value(
    {"steps": 2},
    is_available=True,
    traits=Traits(sends="weights"),
    realised_by={"all_reduce": f"{HERE}:make_scheme"},
    equations={"all_reduce": f"{HERE}:FollowLeaderEquations"},
)
AT_SERVERS = Value(
    {"bound": 1, "lr": "share"},
    is_available=True,
    least={"bound": 0},
    traits=Traits(commit="arrival"),
    realised_by={"servers": f"{HERE}:make_policy"},
    equations={"servers": "weft.proving.served:follow_recipe"},
)


@final
class FollowLeader(AbstractGroupScheme):
    def __init__(self, group: AbstractGroup, steps: int) -> None:
        self._group = group
        self._steps = steps
        self._step = 0
        self._parameters: Mapping[str, Tensor] = {}

    @property
    def period(self) -> int:
        return self._steps

    def join(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._parcel = Parcel(self._group, parameters)

    def begin_together(self) -> None: ...

    def begin(self, step: int, weight: float) -> None:
        self._step = step

    def advance(self) -> None: ...

    def before_update(self) -> None: ...

    def after_update(self, state: OptimizerState) -> OptimizerState:
        if (self._step + 1) % self._steps == 0:
            for name, tensor in self.consensus().items():
                self._parameters[name].data.copy_(tensor)
        return state

    def consensus(self) -> Mapping[str, Tensor]:
        self._parcel.pack(self._parameters)
        self._parcel.start(partial(Broadcast, root=0))
        self._parcel.wait()
        return self._parcel.tensors

    def traffic(self) -> Traffic:
        return Traffic()

    def memory(self) -> Memory:
        return {}

    def remember(self, entries: Mapping[str, Entry]) -> None: ...


@final
class FollowLeaderEquations(AbstractEquations):
    def begin(self) -> None: ...

    def before_update(self, step: int) -> None: ...

    def after_update(self, step: int, counts: Sequence[float]) -> None:
        if (step + 1) % int(self.choice["steps"]) == 0:
            for replica in self.replicas:
                replica.weights.update(clone(self.replicas[0].weights))


def make_scheme(group: AbstractGroup, choice: Choice, codec: AbstractCodec) -> FollowLeader:
    return FollowLeader(group, int(choice["steps"]))


def make_policy(choice: Choice, num_workers: int, *, is_fresh: bool) -> Arrival:
    return Arrival(num_workers, float(choice["bound"]), is_fresh=is_fresh)
