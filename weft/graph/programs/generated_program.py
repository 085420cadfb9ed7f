"""A graph as generated Python: straight-line code, one line an operator, values freed after their last use.

The text is kept as a file that can be read. Results under one part of the outputs, such as the gradients, need not be
returned: each is handed to a sink as soon as it is made, while the rest still has to run. It then belongs to the sink,
so it is copied where anything else holds it.
"""

import hashlib
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from weft.atomic import write_text
from weft.errors import GraphError, StorageError
from weft.graph.fusion import compile_region, region_of, regions_of
from weft.graph.ir.graph import Graph
from weft.graph.ir.interpreter import MINDS_GRAD_MODE, call_of
from weft.graph.ir.source_text import HEADER, argument_text, line_of_node, literal, name_of, variable_names
from weft.graph.programs.program import AbstractProgram, Sink, own, split_results
from weft.operators.compile import cache_folder
from weft.torch_private import below_autograd

__all__ = ["Program", "keep_source"]

_RESERVED = {"below_autograd", "compiled", "constants", "copy", "inputs", "own", "sink", "step", "torch"}


class Program(AbstractProgram):
    """A graph as generated Python, called as `program(state, batch, random)`.

    Args:
        graph: any graph, with named sizes too.
        sunk: a part of the outputs, such as `gradients`, that goes to a sink as it is made (see `run`).
        folder: where the generated file is kept; by default a folder of the user's cache.

    >>> from weft.graph import capture
    >>> program = Program(capture(lambda state, batch: (state * batch, state + 1), torch.ones(2), torch.ones(2)))
    >>> outputs, state, _ = program(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    >>> outputs, state
    (tensor([3., 8.]), tensor([2., 3.]))
    """

    def __init__(self, graph: Graph, *, sunk: str = "", folder: Path | None = None) -> None:
        super().__init__(graph)
        self.source = source_of(graph, sunk)
        self.file = keep_source(self.source, folder)
        self._step = _load(self.source, self.file, graph)

    def step(self, inputs: Sequence[Tensor], sink: Sink) -> list[Any]:
        return self._step(inputs, sink)

    def compute(self, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        region = region_of(node.target)
        return call_of(node)(*args, **kwargs) if region is None else compile_region(region)(list(args[0]))


def keep_source(source: str, folder: Path | None) -> Path:
    """Write the source under a name that says its content. It is for people to read: a full disk does not matter.

    Args:
        folder: by default one of the user's cache.
    """
    file = (folder or cache_folder() / "graphs") / f"step-{hashlib.sha256(source.encode()).hexdigest()[:16]}.py"
    if not file.exists():
        with suppress(StorageError):
            write_text(file, source)
    return file


def _load(source: str, file: Path, graph: Graph) -> Callable[[Sequence[Tensor], Sink], list[Any]]:
    """Run the text just generated, never what the file has become since."""
    given = {"own": own, "copy": torch.clone, "below_autograd": below_autograd, "constants": graph.constants}
    regions = regions_of(graph)
    names: dict[str, Any] = {**given, "compiled": lambda name: compile_region(regions[name])}
    exec(compile(source, str(file), "exec"), names)
    step: Callable[[Sequence[Tensor], Sink], list[Any]] = names["step"]
    return step


def source_of(graph: Graph, sunk: str = "") -> str:
    """The text of a module with a function `step(inputs, sink)`: values of the placeholders in, list of results out.

    The module is to be given `own(tensor)`, which copies what others hold, `copy(tensor)`, `below_autograd(operator)`,
    `compiled(region)` by name, and `constants` by name.

    Args:
        sunk: a part of the outputs; its results are handed to `sink(path, tensor)`, and None is returned for them.
    """
    used = sorted({_alias(node) for node in graph.nodes.nodes if _is_operator(node)})
    taken = _RESERVED | {alias for alias, _ in used}
    if clash := taken & graph.sizes.keys():
        raise GraphError(
            f"a size has a name that generated code needs ({', '.join(clash)}); give it another in dynamic"
        )
    writer = _Writer(graph, _sinking(graph, sunk), variable_names(graph.nodes.nodes, taken | graph.sizes.keys()))
    lines = [f"{alias} = {bound}" for alias, bound in used]
    lines += ["", "", "def step(inputs, sink):", *(f"    {line}" for line in writer.body())]
    return "\n".join([HEADER, *lines, ""])


@dataclass(frozen=True)
class _Sinking:
    """Results by their receiver: `paths` for the sink, `returned` to the caller; nobody else needs `given`."""

    paths: Mapping[fx.Node, Sequence[str]]
    returned: Sequence[Any]
    given: Collection[fx.Node]


def _sinking(graph: Graph, sunk: str) -> _Sinking:
    paths, returned = split_results(graph, sunk)
    is_free = {node: node.op == "call_function" and all(user.op == "output" for user in node.users) for node in paths}
    return _Sinking(paths, returned, {node for node in paths if is_free[node] and node not in returned})


class _Writer:
    """Writes the lines of one step."""

    def __init__(self, graph: Graph, sinking: _Sinking, names: dict[fx.Node, str]) -> None:
        self._graph = graph
        self._sinking = sinking
        self._names = names

    def body(self) -> Iterator[str]:
        dying = _last_uses(self._graph, self._sinking)
        roles = {made.node: made.role for made in self._graph.operators}
        part = ""
        placeholders = self._graph.placeholders
        yield f"[{', '.join(map(self._literal, placeholders))}] = inputs"
        for name, (place, dim) in self._graph.sizes.items():
            yield f"{name} = {self._literal(placeholders[place])}.shape[{dim}]"
        for node in self._graph.nodes.nodes:
            if node.op == "get_attr":
                yield f"{self._literal(node)} = constants[{node.target!r}]"
            elif node.op == "call_function":
                if roles.get(node, part) != part:
                    part = roles[node]
                    yield f"# {part}"
                yield self._call(node)
            if node in dying:
                yield f"del {', '.join(map(self._literal, dying[node]))}"
            yield from self._hand_over(node)
        yield f"return [{', '.join(map(self._literal, self._sinking.returned))}]"

    def _call(self, node: fx.Node) -> str:
        if node.target is operator.getitem:
            source, index = node.args
            return f"{self._literal(node)} = {self._literal(source)}[{index}]"
        arguments = argument_text(node.args, node.kwargs, self._names.__getitem__)
        line = line_of_node(node)
        where = f"  # {line}" if line else ""
        return f"{self._literal(node)} = {_alias(node)[0]}({arguments}){where}"

    def _hand_over(self, node: fx.Node) -> Iterator[str]:
        paths = self._sinking.paths.get(node, [])
        is_given = node in self._sinking.given
        for i, path in enumerate(paths):
            is_last = i == len(paths) - 1 and is_given
            yield f"sink({path!r}, {'own' if is_last else 'copy'}({self._literal(node)}))"
        if is_given:
            yield f"del {self._literal(node)}"

    def _literal(self, value: Any) -> str:
        return literal(value, self._names.__getitem__)


def _last_uses(graph: Graph, sinking: _Sinking) -> dict[fx.Node, list[fx.Node]]:
    """The values to free after each call. Inputs and constants are not ours to free, results live on."""
    alive = {node for node in sinking.returned if node is not None} | set(sinking.given)
    dying: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed([node for node in graph.nodes.nodes if node.op == "call_function"]):
        for value in (node, *node.all_input_nodes):
            if value.op == "call_function" and value not in alive:
                alive.add(value)
                dying.setdefault(node, []).append(value)
    return dying


def _is_operator(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem


def _alias(node: fx.Node) -> tuple[str, str]:
    """`("aten_mm", "torch.ops.aten.mm.default")`."""
    dotted = str(node.target)
    alias = name_of(node.target).replace(".", "_")
    if dotted in MINDS_GRAD_MODE and node.meta.get("in_grad_mode", False):
        return f"{alias}_for_backward", f"below_autograd(torch.ops.{dotted})"
    region = region_of(node.target)
    if region is not None:
        return f"region_{region.name}", f"compiled({region.name!r})"
    return alias, f"torch.ops.{dotted}"
