"""A graph as one function that XLA compiles."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array
from torch import Tensor, fx

from weft.errors import GraphError
from weft.graph.ir.graph import Graph
from weft.graph.ir.interpreter import replay
from weft.graph.ir.pytree import flatten_as, paths_of, unflatten
from weft.graph.jax.conversion import jax_dtype, to_jax, to_torch
from weft.graph.jax.table import OPERATORS, apply_drawn, check_supported, draw, is_drawn
from weft.graph.programs.program import AbstractProgram, Sink, split_results

__all__ = ["JaxProgram"]


class JaxProgram(AbstractProgram):
    """Runs a graph on XLA: every operator through a table of JAX functions, the whole under one `jax.jit`.

    Tensors go in and out without a copy. XLA adds up in another order than ATen, so results agree to rounding, not to
    the bit. All results are there at once: a sink gets its part after the last operator.

    Args:
        sunk: a part of the outputs that goes to a sink.

    Raises:
        GraphError: an operator is not in the table; names its line.
    """

    def __init__(self, graph: Graph, *, sunk: str = "") -> None:
        super().__init__(graph)
        check_supported(graph)
        self._draws = [node for node in graph.nodes.nodes if is_drawn(node)]
        self._sunk, self._returned = split_results(graph, sunk)
        made = [*self._sunk, *(node for node in self._returned if isinstance(node, fx.Node))]
        # What a graph hands through as it came stays the caller's own tensor.
        self._wanted = [node for node in dict.fromkeys(made) if node.op != "placeholder"]
        self._compiled = jax.jit(self._trace)
        self._in_place = jax.jit(self._trace_in_place, donate_argnums=0)

    def step(self, inputs: Sequence[Tensor], sink: Sink) -> list[Any]:
        drawn = [draw(node) for node in self._draws]
        with jax.enable_x64(True):
            arrays = self._compiled([to_jax(t) for t in inputs], [to_jax(t) for t in drawn])
            # XLA reads the inputs where they lie: nobody may write to them before it is done.
            jax.block_until_ready(arrays)  # type: ignore[no-untyped-call]
        values: dict[fx.Node, Any] = dict(zip(self.graph.placeholders, inputs, strict=True))
        values |= {node: _laid_out(array, node) for node, array in zip(self._wanted, arrays, strict=True)}
        handed: set[fx.Node] = set()
        for node, paths in self._sunk.items():
            for path in paths:
                is_own = node.op != "placeholder" and node not in handed and node not in self._returned
                sink(path, values[node] if is_own else values[node].clone())
                handed.add(node)
        return [values[node] if isinstance(node, fx.Node) else node for node in self._returned]

    def compute(self, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        def convert(value: Any, kind: Any, change: Any) -> Any:
            return fx.node.map_aggregate(value, lambda item: change(item) if isinstance(item, kind) else item)

        with jax.enable_x64(True):
            inputs, options = convert((tuple(args), kwargs), Tensor, to_jax)
            drawn = {node: to_jax(draw(node))} if is_drawn(node) else {}
            return convert(_call(node, inputs, options, drawn), Array, lambda array: to_torch(array).clone())

    def steps(self, state: Any, batches: Iterable[Any]) -> tuple[list[Any], Any]:
        """Run a whole step, update and all, on one batch after the other, with the state in XLA's own memory.

        XLA writes each new state over the old one (donation). That is sound because nobody else holds it: what was
        given is copied first, and only the last state is handed out.

        Returns:
            The outputs of every step, and the last state.

        Raises:
            GraphError: the graph draws random numbers, or hands something to a sink.
        """
        if self._draws or self._sunk:
            raise GraphError(
                "a loop of steps cannot draw random numbers or feed a sink; call the program for each step"
            )
        own = self._state_places()
        outputs, held = [], dict[int, Array]()
        with jax.enable_x64(True):
            for batch in batches:
                given = flatten_as(self.graph.arguments, {"state": state, "batch": batch}, len(self.graph.placeholders))
                held = held or {place: jnp.array(to_jax(given[place]), copy=True) for place in own}
                rest = {place: to_jax(tensor) for place, tensor in enumerate(given) if place not in own}
                held, found = self._in_place(held, rest)
                outputs.append(found)
            jax.block_until_ready((held, outputs))  # type: ignore[no-untyped-call]
        final = {result: to_torch(held[place]) for place, result in own.items() if held}
        filled = [self._filled(final | {i: to_torch(a) for i, a in found.items()}) for found in outputs]
        return [one["outputs"] for one in filled], filled[-1]["state"] if filled else state

    def _filled(self, found: dict[int, Tensor]) -> Any:
        return unflatten(self.graph.results, [found.get(place) for place in range(len(self.graph.result_nodes))])

    def _state_places(self) -> dict[int, int]:
        """The place of each tensor of the state among the results, by its place among the placeholders."""
        results = dict(paths_of(self.graph.results))
        return {p: results[path] for path, p in paths_of(self.graph.arguments) if path.partition(".")[0] == "state"}

    def _trace(self, inputs: Sequence[Array], draws: Sequence[Array]) -> list[Array]:
        """The function that jit traces: each operator once, on abstract arrays."""
        values = self._values(inputs, dict(zip(self._draws, draws, strict=True)))
        return [values[node] for node in self._wanted]

    def _trace_in_place(
        self, state: dict[int, Array], batch: dict[int, Array]
    ) -> tuple[dict[int, Array], dict[int, Array]]:
        """A whole step: the new state by the places of the old, the rest by their places among the results."""
        inputs, own = {**state, **batch}, self._state_places()
        values = self._values([inputs[place] for place in range(len(inputs))], {})
        results = {i: values[n] for i, n in enumerate(self.graph.result_nodes) if isinstance(n, fx.Node)}
        rest = {i: array for i, array in results.items() if i not in own.values()}
        return {place: results[result] for place, result in own.items()}, rest

    def _values(self, inputs: Sequence[Array], drawn: dict[fx.Node, Array]) -> dict[fx.Node, Any]:
        constants = self.graph.constants

        def call(node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            return _call(node, args, kwargs, drawn)

        return replay(self.graph.nodes, inputs, lambda name: to_jax(constants[name]), call=call)


def _call(node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any], drawn: dict[fx.Node, Array]) -> Any:
    if node in drawn:
        found = apply_drawn(node, tuple(args), drawn[node])
    else:
        found = OPERATORS[str(node.target)](*args, **kwargs)
    return _in_type(found, node.meta.get("val"))


def _in_type(found: Any, expected: Any) -> Any:
    """In the types that torch's rules of promotion give, which are not JAX's."""
    if isinstance(expected, (tuple, list)):
        return [_in_type(f, e) for f, e in zip(found, expected, strict=False)]
    if found is None or not isinstance(expected, Tensor):
        return found
    return jnp.asarray(found).astype(jax_dtype(expected.dtype))


def _laid_out(array: Array, node: fx.Node) -> Tensor:
    """A tensor with the strides that the graph gives it."""
    tensor, like = to_torch(array), node.meta["val"]
    if tensor.stride() == like.stride():
        return tensor
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(tensor)
