"""A plan: one point in the space of parallel training, with its short text form.

data=4 consistency=stale(3) topology=server(shards=2) compress=topk(0.01)
------ ------------------- ------------------------- -------------------
what is   when replicas       who talks to whom        what is sent
split     agree
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Literal, cast

from weft.specs.axes import AXES, Number, Sends, Value
from weft.specs.mesh import MESH_AXES, Mesh
from weft.specs.roles import Channel, Roles, assign_roles

__all__ = ["Choice", "Plan", "value_of"]


@dataclass(frozen=True)
class Choice:
    """A value of an axis with its parameters: `server(shards=2)`."""

    name: str
    parameters: tuple[tuple[str, Number], ...] = ()

    def __getitem__(self, parameter: str) -> Number:
        return dict(self.parameters)[parameter]

    def get(self, parameter: str, default: Number) -> Number:
        """The value of a parameter, where the choice has it."""
        return dict(self.parameters).get(parameter, default)

    def __str__(self) -> str:
        inside = ",".join(f"{key}={value}" for key, value in self.parameters)
        return f"{self.name}({inside})" if inside else self.name


def value_of(axis: str, choice: Choice) -> Value:
    """The row of the table of axes that describes a choice."""
    return AXES[axis][choice.name]


@dataclass(frozen=True)
class Plan:
    """Four independent axes. `str(plan)` is the short text that `parse_plan` reads.

    >>> from weft.specs import parse_plan
    >>> str(parse_plan("data=4 topology=server(2)"))
    'data=4 topology=server(shards=2)'
    """

    data: int = 1
    shard: int = 1
    tensor: int | tuple[int, ...] = 1  # of each stage, where they differ
    pipeline: int = 1
    expert: int = 1
    linear: int = 1
    shard_level: Choice = Choice("1")
    schedule: Choice = Choice("1f1b")
    cut: Choice = Choice("flops")
    activations: Choice = Choice("none")
    share: Choice = Choice("equal")
    consistency: Choice = Choice("sync")
    topology: Choice = Choice("native")
    compress: Choice = Choice("none")

    @property
    def num_ranks(self) -> int:
        """Ranks that compute, on all axes together."""
        return self.mesh(0).num_ranks

    @property
    def num_replicas(self) -> int:
        """Copies of the model that are trained on different shares of a batch."""
        return self.mesh(0).num_replicas

    def mesh(self, rank: int) -> Mesh:
        """The mesh of the plan as a rank sees it."""
        sizes = {axis: getattr(self, axis) for axis in MESH_AXES if axis != "tensor"}
        if isinstance(self.tensor, tuple):
            return Mesh(rank, **sizes, stages=self.tensor)
        return Mesh(rank, **sizes, tensor=self.tensor)

    @property
    def num_micro_batches(self) -> int:
        """Into which a rank's share of a batch is cut, to go through the stages one after the other."""
        usual = value_of("schedule", self.schedule).parameters.get("micro", 1)
        return int(self.schedule.get("micro", usual)) if self.pipeline > 1 else 1

    @property
    def is_streamed(self) -> bool:
        """Whether a pipeline is never emptied between steps: its stages update each at its own time."""
        return self.pipeline > 1 and "sync" in dict(self.schedule.parameters)

    @property
    def stage_costs(self) -> Literal["flops", "time", "parameters"]:
        """By which layers are dealt to stages."""
        return cast(Literal["flops", "time", "parameters"], self.cut.name)

    @property
    def measures_stages(self) -> bool:
        """Whether stages are cut for ranks of unequal speed, which is measured."""
        return self.cut.get("stages", "equal") == "measured"

    @property
    def stage_memory(self) -> float:
        """Bytes that a stage may take."""
        return 1e9 * float(self.cut.get("memory", math.inf))

    @property
    def cuts_by_samples(self) -> bool:
        """Whether the cut of a model hangs on how many samples go through it at a time."""
        return self.pipeline > 1 and (self.cut.name == "time" or self.stage_memory < math.inf)

    @property
    def splits_tensors(self) -> bool:
        """Whether layers are split, in one stage at least."""
        return self.tensor != 1

    @property
    def splits_layers(self) -> bool:
        """Whether ranks compute parts of layers, or layers for parts of a batch, whose sums they then make."""
        return self.splits_model or self.expert > 1 or self.linear > 1

    @property
    def splits_model(self) -> bool:
        """Whether a replica is more than one rank."""
        return self.num_ranks > self.num_replicas

    @property
    def splits_parameters(self) -> bool:
        """Whether a rank holds parts of parameters, or some of them, and not the whole model."""
        return self.splits_model or self.expert > 1 or self.linear > 1 or self.sharding_level > 1

    @property
    def sharding_level(self) -> int:
        """The stage of ZeRO: 1 for optimizer state, 2 for gradients too, 3 for parameters too; 0 where nothing is
        split over `shard`."""
        return int(self.shard_level.name) if self.shard > 1 else 0

    @property
    def offloads_state(self) -> bool:
        """Whether optimizer state lies on disk."""
        return self.shard > 1 and self.shard_level.get("offload", "none") == "disk"

    @property
    def channel(self) -> Channel:
        """How ranks reach each other: in a group of all, through servers, or each its neighbours alone."""
        value = value_of("consistency", self.consistency)
        channels = value.realised_by
        if list(channels) == ["servers"] or ("servers" in channels and self._has_servers):
            return "servers"
        is_alone = any(self.consistency.get(key, "") == word for key, word in value.neighbours_if.items())
        return "neighbours" if is_alone else "all_reduce"

    # What others ask of a consistency, in place of its name.

    @property
    def is_synchronous(self) -> bool:
        """Whether ranks meet in every step, and have the bits of one rank."""
        return value_of("consistency", self.consistency).traits.is_synchronous

    @property
    def sends(self) -> Sends:
        """The tensors that ranks exchange; weights and differences are of ranks that make updates of their own."""
        default = value_of("consistency", self.consistency).traits.sends
        return cast(Sends, self.consistency.get("push", default))

    @property
    def commits_on_arrival(self) -> bool:
        """Whether servers update for each push as it arrives; else once for those of a round."""
        default = value_of("consistency", self.consistency).traits.commit
        return self.consistency.get("commit", default) == "arrival"

    @property
    def skips_rounds(self) -> bool:
        """Whether a rank leaves out the rounds that it is late for."""
        return value_of("consistency", self.consistency).traits.skips_rounds

    @property
    def measured_every(self) -> int | None:
        """Steps from one measurement to the next, where shares of a batch are dealt by measured speed; None where they
        are equal."""
        return int(self.share["every"]) if self.share.name == "measured" else None

    @property
    def sends_factors(self) -> bool:
        """Whether gradients of linear layers travel as the factors that they are products of."""
        return self.compress.name == "factors"

    @property
    def period(self) -> int:
        """Steps from one exchange to the next."""
        return int(self.consistency.get("steps", 1))

    @property
    def num_synchronous_steps(self) -> int:
        """Steps that relaxed ranks take as synchronous ones before they begin."""
        return int(self.consistency.get("after", 0))

    # Servers.

    @property
    def _has_servers(self) -> bool:
        return self.num_shards > 0 and self.num_replicas > 1

    @property
    def num_shards(self) -> int:
        """Servers among which parameters are cut, of each part of a model that ranks hold in parts; 0 where there are
        none."""
        return int(self.topology.get("shards", 0))

    @property
    def num_servers(self) -> int:
        """Of all parts together; those of a part come one after the other."""
        return self.num_shards * self.mesh(0).num_parts

    @property
    def ranks_per_host(self) -> int:
        """Ranks to a host server; 1 means that there are none."""
        return int(self.topology.get("inner", 1)) if self.topology.name == "server" else 1

    @property
    def num_hosts(self) -> int:
        """Host servers, each in front of the global ones for `inner` ranks, the last for those that are left."""
        return -(-self.num_ranks // self.ranks_per_host) if self.ranks_per_host > 1 else 0

    @property
    def roles(self) -> Roles:
        """The role of each address of the plan, and the process it is in.

        >>> from weft.specs import parse_plan
        >>> parse_plan("data=2 consistency=async topology=server").roles.names
        ('worker, server 0', 'worker')
        """
        mesh = self.mesh(0)
        parts = range(mesh.num_parts) if self.channel == "servers" else ()
        return assign_roles(
            self.num_ranks,
            self.channel,
            holders=tuple(rank for part in parts for rank in _first(mesh.holders_of(part), self.num_shards)),
            num_hosts=self.num_hosts,
            ranks_per_host=self.ranks_per_host,
            is_own=self.topology.get("place", "shared") == "own",
            is_strict=self.is_synchronous,
            ranks_per_replica=mesh.num_parts,
        )

    def __str__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        defaults = Plan.__dataclass_fields__
        shown = {k: v for k, v in values.items() if k == "data" or v != defaults[k].default}
        return " ".join(f"{key}={_spell(key, value)}" for key, value in shown.items())


def _first(ranks: tuple[int, ...], number: int) -> tuple[int, ...]:
    """So many, from the beginning again where there are fewer: servers of their own are beside nobody."""
    return tuple(ranks[i % len(ranks)] for i in range(number))


UNSAID = ("none", "nearest")
"""Words that go without saying, where they are as usual."""


def _spell(key: str, value: int | tuple[int, ...] | Choice) -> str:
    """A degree or a choice as short text: of the parameters the first, and those that are not as usual."""
    if not isinstance(value, Choice):
        return str(value) if isinstance(value, int) else ":".join(map(str, value))
    defaults = AXES[key][value.name].parameters
    usual = [p[1] == defaults.get(p[0]) for p in value.parameters]
    shown = [p for i, p in enumerate(value.parameters) if not usual[i] or (i == 0 and p[1] not in UNSAID)]
    return str(replace(value, parameters=tuple(shown)))
