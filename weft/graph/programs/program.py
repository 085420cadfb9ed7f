"""The program seam: what runs a graph, on values of its placeholders."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, fx

from weft.errors import GraphError
from weft.graph.ir.graph import Graph
from weft.graph.ir.pytree import flatten_as, paths_of, unflatten
from weft.graph.ir.symbolic_sizes import SMALLEST, resolved, shape_of, strides_of
from weft.torch_private import shares_memory

__all__ = ["AbstractProgram", "MakeProgram", "ProgramCache", "Sink", "measure_sizes", "own", "refuse", "split_results"]

Sink = Callable[[str, Tensor], None]


class AbstractProgram(ABC):
    """Runs a graph: `outputs, state, random = program(state, batch, random)`."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._expected = [node.meta["val"] for node in graph.placeholders]

    @abstractmethod
    def step(self, inputs: Sequence[Tensor], sink: Sink) -> list[Any]:
        """Values of the placeholders in, values of the results out; randomness is that of the default generator."""

    @abstractmethod
    def compute(self, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """One operator alone, on torch's tensors, as this program computes it: for finding the one that differs."""

    def __call__(self, state: Any, batch: Any, random: Tensor | None = None) -> tuple[Any, Any, Tensor | None]:
        """One step.

        Args:
            state, batch: of the form, shapes and types that were captured.
            random: the state of a generator; needed where the graph draws random numbers.

        Returns:
            `(outputs, new state, random)`, the last moved on by what was drawn.

        Raises:
            GraphError: state or batch differ in form, shape or type from what was captured, or `random` is missing.
        """
        given = flatten_as(self.graph.arguments, {"state": state, "batch": batch}, len(self._expected))
        sizes = measure_sizes(self.graph, given)
        inputs = [self._checked(place, tensor, sizes) for place, tensor in enumerate(given)]
        results, random = self.run(inputs, refuse, random)
        filled = unflatten(self.graph.results, results)
        return filled["outputs"], filled["state"], random

    def run(self, inputs: Sequence[Tensor], sink: Sink, random: Tensor | None) -> tuple[list[Any], Tensor | None]:
        """The flat form, unchecked: values of the placeholders in, values of the results out."""
        with torch.no_grad():
            if not self.graph.uses_random:
                return self.step(inputs, sink), random
            if random is None:
                raise GraphError("graph draws random numbers; pass the state of a generator as random")
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(random)
                return self.step(inputs, sink), torch.get_rng_state()

    def _checked(self, place: int, tensor: Tensor, sizes: Mapping[str, int]) -> Tensor:
        """The tensor, laid out in memory as the captured one was."""
        like = self._expected[place]
        shape, strides = resolved((shape_of(like), strides_of(like)), sizes)
        if tensor.shape != shape or tensor.dtype != like.dtype:
            path = next(path for path, leaf in paths_of(self.graph.arguments) if leaf == place)
            found, wanted = f"{tensor.dtype} {list(tensor.shape)}", f"{like.dtype} {list(shape_of(like))}"
            known = "".join(f", {name}: {size}" for name, size in sizes.items())
            raise GraphError(
                f"input is not what was captured ({path}: {found}, wanted: {wanted}{known}); capture again"
            )
        if tensor.stride() == strides:
            return tensor
        fresh = torch.empty_strided(shape, strides, dtype=like.dtype, device=tensor.device)
        return fresh.copy_(tensor.detach())


MakeProgram = Callable[[Graph, str], AbstractProgram]
"""From a graph, and the part of its outputs that goes to a sink, to what runs it."""


T = TypeVar("T", bound=AbstractProgram)


class ProgramCache(Generic[T]):
    """Programs by the form of their arguments. The least recently used one goes where there are more than `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._made: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The program of a key; made now if there is none."""
        if key in self._made:
            self._made.move_to_end(key)
            return self._made[key]
        self._made[key] = made = make()
        if len(self._made) > self._limit:
            self._made.popitem(last=False)
        return made


def own(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where anything else holds its memory."""
    return tensor.clone() if shares_memory(tensor) else tensor


def refuse(path: str, _tensor: Tensor) -> None:
    raise AssertionError(f"nothing was to be handed over ({path})")


def measure_sizes(graph: Graph, inputs: Sequence[Tensor]) -> dict[str, int]:
    """The value of each named size, for these values of the placeholders.

    Raises:
        GraphError: the graph was captured for other sizes.
    """
    sizes: dict[str, int] = {}
    for name, (place, dim) in graph.sizes.items():
        if dim >= inputs[place].ndim:
            path = next(path for path, leaf in paths_of(graph.arguments) if leaf == place)
            raise GraphError(f"input has no dimension {dim}, {name} ({path}: {list(inputs[place].shape)})")
        sizes[name] = inputs[place].shape[dim]
        if sizes[name] < SMALLEST:
            raise GraphError(
                f"a named size is at least {SMALLEST} ({name}: {sizes[name]}); capture without dynamic for it"
            )
    for condition in graph.conditions:
        if not condition.holds(sizes):
            found = ", ".join(f"{name}: {size}" for name, size in sizes.items())
            raise GraphError(f"graph holds for other sizes only ({found}; needs: {condition}, {condition.line})")
    return sizes


def split_results(graph: Graph, sunk: str) -> tuple[dict[fx.Node, list[str]], list[fx.Node | None]]:
    """The results of a graph by their receiver.

    Args:
        sunk: a part of the outputs, such as `gradients`, that goes to a sink; empty for none.

    Returns:
        The paths under which each node's value goes to the sink; and the node of each result for the caller, None where
        only the sink gets it.
    """
    prefix, nodes = f"outputs.{sunk}.", graph.result_nodes
    paths: dict[fx.Node, list[str]] = {}
    returned: list[fx.Node | None] = [None] * len(nodes)
    for path, place in paths_of(graph.results):
        if sunk and path.startswith(prefix):
            paths.setdefault(nodes[place], []).append(path.removeprefix(prefix))
        else:
            returned[place] = nodes[place]
    return paths, returned
