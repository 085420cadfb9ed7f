"""A plan: one point in the space of parallel training, with its short text form.

data=4 consistency=stale(3) topology=server(shards=2) compress=topk(0.01)
------ ------------------- ------------------------- -------------------
what is   when replicas       who talks to whom        what is sent
split     agree
"""

from dataclasses import dataclass, fields, replace

from weft.specs.axes import AXES, Number

__all__ = ["Choice", "Plan"]


@dataclass(frozen=True)
class Choice:
    """A value of an axis with its parameters: `server(shards=2)`."""

    name: str
    parameters: tuple[tuple[str, Number], ...] = ()

    def __getitem__(self, parameter: str) -> Number:
        return dict(self.parameters)[parameter]

    def __str__(self) -> str:
        inside = ",".join(f"{key}={value}" for key, value in self.parameters)
        return f"{self.name}({inside})" if inside else self.name


@dataclass(frozen=True)
class Plan:
    """Four independent axes. `str(plan)` is the short text that `parse_plan` reads.

    >>> from weft.specs import parse_plan
    >>> str(parse_plan("data=4 topology=server(2)"))
    'data=4 topology=server(shards=2)'
    """

    data: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    consistency: Choice = Choice("sync")
    topology: Choice = Choice("native")
    compress: Choice = Choice("none")

    @property
    def num_ranks(self) -> int:
        return self.data * self.shard * self.tensor * self.pipeline

    @property
    def is_served(self) -> bool:
        """Whether ranks meet nobody but servers."""
        return self.consistency.name in ("async", "stale", "backup") or self.has_served_centre

    @property
    def has_served_centre(self) -> bool:
        """Whether elastic ranks find their centre at servers, each at its own pace, instead of in turns on rank 0."""
        return self.consistency.name == "elastic" and self.topology.name == "server"

    @property
    def has_own_servers(self) -> bool:
        """Whether servers are processes of their own."""
        return dict(self.topology.parameters).get("place") == "own"

    @property
    def ranks_per_host(self) -> int:
        """Ranks to a host server; 1 means none."""
        return int(dict(self.topology.parameters).get("inner", 1)) if self.topology.name == "server" else 1

    @property
    def is_paired(self) -> bool:
        """Whether ranks meet one neighbour at a time, each at its own pace."""
        return self.consistency.name == "gossip" and self.consistency["mix"] == "pair"

    @property
    def is_mailed(self) -> bool:
        """Whether ranks gossip over the mailbox, and go on without those that die."""
        return self.is_paired or (self.consistency.name == "gossip" and self.consistency["lost"] == "drop")

    @property
    def num_addresses(self) -> int:
        """Ranks, and those who answer beside them over the mailbox: servers, or a responder for every rank."""
        servers = int(self.topology["shards"]) + self.num_hosts if self.is_served else 0
        beside = self.num_ranks if self.is_mailed else servers
        return self.num_ranks + beside

    @property
    def num_processes(self) -> int:
        """Ranks, and the servers that are processes of their own; these come after the ranks."""
        return self.num_ranks + (int(self.topology["shards"]) + self.num_hosts if self.has_own_servers else 0)

    @property
    def num_hosts(self) -> int:
        """Host servers, each in front of the global ones for `inner` ranks, the last for those that are left."""
        return -(-self.num_ranks // self.ranks_per_host) if self.ranks_per_host > 1 else 0

    @property
    def roles(self) -> tuple[str, ...]:
        """What each process is for.

        >>> from weft.specs import parse_plan
        >>> parse_plan("data=2 consistency=async topology=server(shards=1,place=own)").roles
        ('worker', 'worker', 'server 0')
        >>> parse_plan("data=2 consistency=async topology=server").roles
        ('worker, server 0', 'worker')
        >>> parse_plan("data=3 consistency=async topology=server(inner=2)").roles
        ('worker, server 0, host server 0', 'worker', 'worker, host server 1')
        """
        workers = ("worker",) * self.num_ranks
        if self.topology.name != "server":
            return workers
        servers = [f"server {shard}" for shard in range(int(self.topology["shards"]))]
        hosts = [f"host server {host}" for host in range(self.num_hosts)]
        if self.num_processes > self.num_ranks:
            return (*workers, *servers, *hosts)
        shared = {rank: [name] for rank, name in enumerate(servers)}
        for host, name in enumerate(hosts):
            shared.setdefault(host * self.ranks_per_host, []).append(name)
        return tuple(", ".join([role, *shared.get(rank, ())]) for rank, role in enumerate(workers))

    def __str__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        defaults = Plan.__dataclass_fields__
        shown = {k: v for k, v in values.items() if k == "data" or v != defaults[k].default}
        return " ".join(f"{key}={_spell(key, value)}" for key, value in shown.items())


def _spell(key: str, value: int | Choice) -> str:
    """A degree or a choice as short text: of the parameters the first, and those that are not as usual."""
    if isinstance(value, int):
        return str(value)
    defaults = AXES[key][value.name].parameters
    shown = [p for i, p in enumerate(value.parameters) if i == 0 or p[1] != defaults.get(p[0])]
    return str(replace(value, parameters=tuple(shown)))
