"""A backward pass in two halves: gradients of inputs, for which another stage waits, and later those of parameters.

    output <- f3 <- f2 <- f1 <- input          first half: along this line, noting the gradient that comes into each f
               |     |     |                   second half: from each f, with what was noted, to its own parameters
               w3    w2    w1

Autograd computes of a function's gradients only those that are asked for, so both halves together are one backward
pass. A parameter that several functions use is reached from the upper one through the lower one too: its gradient is
made in the first half, where it is made once.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = ["SplitBackward"]

Node = Any  # torch.autograd.graph.Node, whose attributes the stubs do not have


@final
class SplitBackward:
    """Of one micro-batch through one chunk: `inputs` first, then `weights`.

    Args:
        roots: outputs that the loss hangs on, or the loss.
        gradients: of the roots.
        leaves: inputs whose gradients are wanted.
        parameters: by name; only those that can be reached matter.
    """

    def __init__(
        self,
        roots: Sequence[Tensor],
        gradients: Sequence[Tensor],
        leaves: Sequence[Tensor],
        parameters: Mapping[str, Tensor],
    ) -> None:
        self._roots, self._gradients, self._leaves = list(roots), list(gradients), list(leaves)
        self._parameters = parameters
        self._noted: dict[Node, tuple[Tensor | None, ...]] = {}
        nodes = _topological([get_gradient_edge(root).node for root in roots])
        named = {get_gradient_edge(parameter).node: name for name, parameter in parameters.items()}
        self._forks, shared = _find_forks(nodes, {get_gradient_edge(leaf).node for leaf in leaves}, named)
        self._shared = sorted(shared)

    def inputs(self) -> tuple[list[Tensor | None], dict[str, Tensor | None]]:
        """The gradients of the leaves, in their order, and of parameters that cannot wait, by name."""
        if not self._leaves:
            return [], {}
        handles = [node.register_prehook(self._note(node)) for node in self._forks]
        wanted = self._leaves + [self._parameters[name] for name in self._shared]
        try:
            found = torch.autograd.grad(self._roots, wanted, self._gradients, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        split = len(self._leaves)
        return list(found[:split]), dict(zip(self._shared, found[split:], strict=True))

    def weights(self) -> dict[str, Tensor | None]:
        """The gradients of all other parameters."""
        if not self._leaves:
            names = list(self._parameters)
            wanted = [self._parameters[name] for name in names]
            found = torch.autograd.grad(self._roots, wanted, self._gradients, allow_unused=True)
            return dict(zip(names, found, strict=True))
        total: dict[str, Tensor | None] = {}
        for node, names in self._forks.items():
            noted = self._noted.pop(node, ())
            edges = [(GradientEdge(node, i), gradient) for i, gradient in enumerate(noted) if gradient is not None]
            if edges:
                roots, gradients = zip(*edges, strict=True)
                wanted = [self._parameters[name] for name in names]
                found = torch.autograd.grad(roots, wanted, gradients, retain_graph=True, allow_unused=True)
                total |= dict(zip(names, found, strict=True))
        return total

    def _note(self, node: Node) -> Any:
        def hook(gradients: tuple[Tensor | None, ...]) -> None:
            self._noted[node] = gradients

        return hook


def _topological(roots: Sequence[Node]) -> list[Node]:
    """All nodes that can be reached, each after those that it leads to. Without recursion: graphs are deep."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(below, False) for below, _ in node.next_functions if below is not None]
    return order


def _find_forks(
    nodes: Sequence[Node], leaves: set[Node], named: Mapping[Node, str]
) -> tuple[dict[Node, list[str]], set[str]]:
    """The nodes on the way to a leaf from which a parameter is reached beside that way, with the names of those
    parameters; and the names of parameters that are reached from several, or from a root directly."""
    leads = set(leaves)  # nodes on the way to a leaf
    beside: dict[Node, frozenset[str]] = {}  # of the others, the parameters that they lead to
    forks: dict[Node, list[str]] = {}
    uses: dict[str, int] = {}
    for node in nodes:
        below = [other for other, _ in node.next_functions if other is not None]
        if node in leads or any(other in leads for other in below):
            leads.add(node)
            names = frozenset().union(*(beside[other] for other in below if other not in leads))
            if names:
                forks[node] = sorted(names)
                for name in names:
                    uses[name] = uses.get(name, 0) + 1
        else:
            own = {named[node]} if node in named else set()
            beside[node] = frozenset(own).union(*(beside[other] for other in below))
    alone = {name for name, number in uses.items() if number == 1}
    kept = {node: [name for name in names if name in alone] for node, names in forks.items()}
    return {node: names for node, names in kept.items() if names}, set(named.values()) - alone
