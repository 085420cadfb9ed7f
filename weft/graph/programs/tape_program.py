"""The profiling tape: a graph run one operator at a time, with the time and the cost of each.

    inputs -> | mm 12 us | add 3 us | tanh 5 us | ... -> results        the bits of eager mode

Slower than generated code by what it takes to look at the clock, but each operator's time is its own.
"""

import operator
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from weft.graph.ir.graph import Graph, Operator
from weft.graph.ir.interpreter import call_of, last_reads
from weft.graph.programs.program import AbstractProgram, Sink, split_results
from weft.operators.aten_cost import cost_of
from weft.operators.cost import Cost

__all__ = ["TapeProgram", "Timed"]

_NUM_KEPT = 200  # steps: a long run must not fill the memory with times


@dataclass(frozen=True)
class Timed:
    """One operator of a graph, as it ran."""

    operator: Operator
    seconds: tuple[float, ...]  # of each step, oldest first
    cost: Cost | None  # None where it is not known
    shape: tuple[int, ...] = ()  # of its first result, empty where that is no tensor


class TapeProgram(AbstractProgram):
    """Runs a graph operator by operator and notes the time of each.

    Args:
        sunk: a part of the outputs, such as `gradients`, that goes to a sink as it is made, always as a copy.
        clock: seconds from any origin.
    """

    def __init__(self, graph: Graph, *, sunk: str = "", clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(graph)
        self._clock = clock
        self._done = last_reads(graph.nodes)
        self._sunk, self._returned = split_results(graph, sunk)
        self._seconds: dict[fx.Node, deque[float]] = {}
        self._known: dict[fx.Node, tuple[Cost | None, tuple[int, ...]]] = {}

    @property
    def records(self) -> tuple[Timed, ...]:
        """Every operator, in the order in which they run."""
        return tuple(
            Timed(made, tuple(self._seconds[made.node]), *self._known[made.node])
            if made.node in self._seconds
            else Timed(made, (), None)
            for made in self.graph.operators
        )

    def step(self, inputs: Sequence[Tensor], sink: Sink) -> list[Any]:
        values: dict[fx.Node, Any] = dict(zip(self.graph.placeholders, inputs, strict=True))
        for node in self.graph.nodes.nodes:
            if node.op == "get_attr":
                values[node] = self.graph.constants[str(node.target)]
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = self._timed(node, args, kwargs)
            elif node.op == "output":
                return [values[value] if isinstance(value, fx.Node) else value for value in self._returned]
            for path in self._sunk.get(node, ()):
                sink(path, values[node].clone())
            for value in self._done.get(node, ()):
                del values[value]
        raise AssertionError("graph has no output node")

    def compute(self, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return call_of(node)(*args, **kwargs)

    def _timed(self, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        call = call_of(node)
        if node.target is operator.getitem:
            return call(*args)
        started = self._clock()
        value = call(*args, **kwargs)
        seconds = self._clock() - started
        if node not in self._seconds:
            self._seconds[node] = deque(maxlen=_NUM_KEPT)
            self._known[node] = cost_of(node.target, args, kwargs, value), _shape_of(value)
        self._seconds[node].append(seconds)
        return value


def _shape_of(value: Any) -> tuple[int, ...]:
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return tuple(first.shape) if isinstance(first, Tensor) else ()
