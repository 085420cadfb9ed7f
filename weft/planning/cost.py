"""The cost of communication as data, in one shape for collectives, for plans, and for every address of them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from weft.specs.roles import RoleKind, Roles

__all__ = ["CommunicationCost", "Cost", "busiest", "estimate", "together"]


@dataclass(frozen=True)
class Cost:
    """Of one address, in a call or in a step of its own, on average.

    Args:
        bytes_sent: of tensors; headers of messages come on top, some hundred bytes each.
        rounds: messages that it waits for, one after the other.
        path_bytes: the bytes of these, the largest of each round.
        bytes_reduced: bytes of tensors that it adds up, mixes or encodes.
        memory: bytes that it holds from one step to the next, besides the model, its gradients and the optimizer's
            state. Less than nothing where it holds less than those.
    """

    bytes_sent: float = 0.0
    rounds: float = 0.0
    path_bytes: float = 0.0
    bytes_reduced: float = 0.0
    memory: float = 0.0

    def plus(self, other: "Cost") -> "Cost":
        """Of both, one after the other."""
        return Cost(*(mine + its for mine, its in zip(_values(self), _values(other), strict=True)))

    def mean_over(self, num_steps: float) -> "Cost":
        """Of a step, where this is paid once in so many; what is held is held in all of them."""
        return replace(Cost(*(value / num_steps for value in _values(self))), memory=self.memory)


def _values(cost: Cost) -> tuple[float, ...]:
    return cost.bytes_sent, cost.rounds, cost.path_bytes, cost.bytes_reduced, cost.memory


def busiest(costs: Iterable[Cost]) -> Cost:
    """The most of each; nothing of nobody.

    >>> busiest([Cost(bytes_sent=1.0, rounds=5.0), Cost(bytes_sent=2.0)])
    Cost(bytes_sent=2.0, rounds=5.0, path_bytes=0.0, bytes_reduced=0.0, memory=0.0)
    """
    return Cost(*(max(values) for values in zip(*map(_values, set(costs)), strict=True)))


def together(costs: Iterable[Cost]) -> Cost:
    """Of addresses that share a process: it sends, adds up and holds for all; they wait side by side."""
    chosen = list(costs)
    if len(chosen) == 1:
        return chosen[0]
    most = busiest(chosen)
    sent, reduced, memory = (
        sum(values) for values in zip(*((c.bytes_sent, c.bytes_reduced, c.memory) for c in chosen), strict=True)
    )
    return replace(most, bytes_sent=sent, bytes_reduced=reduced, memory=memory)


@dataclass(frozen=True)
class CommunicationCost:
    """The cost of every address of a group or of a plan, in the order of `roles`; `between_bytes` are those that host
    servers and shards send each other."""

    addresses: tuple[Cost, ...]
    roles: Roles
    between_bytes: float = 0.0

    def of(self, kind: RoleKind) -> Cost:
        """The busiest address of a kind."""
        return busiest(cost for cost, its in zip(self.addresses, self.roles.kinds, strict=True) if its == kind)

    @property
    def busiest(self) -> Cost:
        """The busiest process; several addresses may share one."""
        return busiest(together(self.addresses[address] for address in own) for own in self.roles.processes)

    @property
    def rounds(self) -> float:
        return self.busiest.rounds

    @property
    def rank_bytes(self) -> float:
        """Bytes that the busiest process sends."""
        return self.busiest.bytes_sent

    @property
    def total_bytes(self) -> float:
        """Bytes that all send."""
        return sum(cost.bytes_sent for cost in self.addresses)

    def plus(self, other: "CommunicationCost") -> "CommunicationCost":
        """Of both, one after the other, by the same addresses."""
        pairs = zip(self.addresses, other.addresses, strict=True)
        addresses = tuple(mine.plus(its) for mine, its in pairs)
        return replace(self, addresses=addresses, between_bytes=self.between_bytes + other.between_bytes)

    def mean_over(self, num_steps: float) -> "CommunicationCost":
        """Of a step, where this is paid once in so many."""
        addresses = tuple(cost.mean_over(num_steps) for cost in self.addresses)
        return replace(self, addresses=addresses, between_bytes=self.between_bytes / num_steps)

    def holding(self, memory: float) -> "CommunicationCost":
        """With so many bytes more at every worker."""
        pairs = zip(self.addresses, self.roles.kinds, strict=True)
        addresses = tuple(c.plus(Cost(memory=memory)) if kind == "worker" else c for c, kind in pairs)
        return replace(self, addresses=addresses)


def estimate(cost: CommunicationCost, alpha: float, beta: float, gamma: float = 0.0) -> float:
    """Seconds on a network without contention, all of whose links are alike.

    Args:
        alpha, beta, gamma: seconds per message, per byte sent, and per byte reduced.
    """
    most = cost.busiest
    return most.rounds * alpha + most.path_bytes * beta + most.bytes_reduced * gamma
