"""The cost of sufficient factors as data: rows of inputs and of output gradients in place of their product.

    dW = dY^T X     X: rows of all ranks, (R, inputs); dY: (R, outputs)

    gathered by a ring      every rank sends (P - 1) / P of R (inputs + outputs) numbers
    added up by a ring      every rank sends 2 (P - 1) / P of inputs * outputs numbers

so that factors are fewer where  R (inputs + outputs) < 2 inputs outputs,  for any number of ranks P.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from weft.planning.collective_cost import all_reduce_cost, collective_cost
from weft.planning.cost import CommunicationCost, Cost
from weft.planning.plan_cost import algorithm_of
from weft.specs.plan import Plan

__all__ = ["FactoredShape", "factored_cost"]


@dataclass(frozen=True)
class FactoredShape:
    """Of a fully connected layer.

    >>> layer = FactoredShape(num_inputs=4096, num_outputs=1024)
    >>> layer.sends_factors(num_rows=32), layer.sends_factors(num_rows=2048)
    (True, False)
    """

    num_inputs: int
    num_outputs: int

    @property
    def width(self) -> int:
        """Numbers in a row of both factors."""
        return self.num_inputs + self.num_outputs

    @property
    def num_weights(self) -> int:
        return self.num_inputs * self.num_outputs

    def sends_factors(self, num_rows: int) -> bool:
        """Whether the factors are fewer bytes than the gradient, for so many rows of all ranks together."""
        return num_rows * self.width < 2 * self.num_weights


def factored_cost(
    plan: Plan, layers: Sequence[FactoredShape], num_rows: int, num_bytes: float, element_bytes: int = 4
) -> CommunicationCost:
    """Of a step of synchronous ranks in a group that send factors where these are fewer bytes.

    Args:
        layers: that can be sent so.
        num_rows: of all ranks together, in each of the layers; every rank has as many.
        num_bytes: of all gradients.

    >>> from weft.specs import parse_plan
    >>> plan, layer = parse_plan("data=4 compress=factors"), FactoredShape(4096, 4096)
    >>> factored_cost(plan, [layer], 32, 4.0 * layer.num_weights).busiest.bytes_sent / 2**20
    0.75
    """
    sent = [layer for layer in layers if layer.sends_factors(num_rows)]
    dense = num_bytes - element_bytes * sum(layer.num_weights for layer in sent)
    one = all_reduce_cost(algorithm_of(plan), plan.num_ranks, dense).busiest
    for layer in sent:
        gathered = element_bytes * num_rows * layer.width
        one = one.plus(collective_cost("all_gather", plan.num_ranks, gathered).busiest).plus(Cost(memory=gathered))
    return CommunicationCost((one,) * plan.num_ranks, plan.roles)
