"""A graph as readable text, one operator a line."""

from collections.abc import Iterator

from weft.graph.formats.loop_bodies import bodies_in, find_body
from weft.graph.ir.graph import Graph, Operator, Variable
from weft.graph.ir.source_text import argument_text
from weft.graph.ir.symbolic_sizes import SMALLEST

__all__ = ["text_of", "type_of"]


def text_of(graph: Graph) -> str:
    """A graph as text: inputs, operators in order under the part of the step they belong to, results, bodies of loops.

    >>> import torch
    >>> from weft.graph.capture.capture import capture
    >>> graph = capture(lambda state, batch: (state * batch, state + 1), torch.ones(2), torch.ones(2))
    >>> print(text_of(graph))  # doctest: +ELLIPSIS
    1 forward, 1 update operators
    inputs
      state                    float32[2]           state
      batch                    float32[2]           batch
    forward
      mul                      float32[2]           aten.mul.Tensor(state, batch)  # ...:1
    update
      add                      float32[2]           aten.add.Tensor(state, 1)  # ...:1
    results
      outputs                  = mul
      state                    = add
    """
    lines = list(_lines(graph))
    for key in bodies_in(graph):
        lines += [f"body {key}", *(f"  {line}" for line in _lines(find_body(key)))]
    return "\n".join(line.rstrip() for line in lines)


def type_of(variable: Variable) -> str:
    """`float32[8, 3]`, or `?` for what is no tensor."""
    if variable.dtype is None:
        return "?"
    return f"{str(variable.dtype).removeprefix('torch.')}{list(variable.shape)}"


def _lines(graph: Graph) -> Iterator[str]:
    roles = [operator.role for operator in graph.operators]
    yield ", ".join(f"{roles.count(role)} {role}" for role in dict.fromkeys(roles)) + " operators"
    yield "inputs"
    for variable in graph.variables.values():
        if variable.owner is None:
            yield _row(variable.name, type_of(variable), variable.path or variable.role)
    yield from _sizes(graph)
    part = ""
    for operator in graph.operators:
        if operator.role != part:
            part = operator.role
            yield part
        yield from _call(operator)
    yield "results"
    for part, results in (("outputs", graph.outputs), ("state", graph.updates)):
        for path, name in results.items():
            if part == "outputs" or graph.variables[name].owner is not None:
                yield f"  {'.'.join(filter(None, (part, path))):<24} = {name}"


def _sizes(graph: Graph) -> Iterator[str]:
    if graph.sizes:
        yield "sizes"
    for name, (place, dim) in graph.sizes.items():
        yield _row(name, f"at least {SMALLEST}", f"{graph.placeholders[place].name}.shape[{dim}]")
    for condition in graph.conditions:
        yield _row("", "needs", f"{condition}  # {condition.line}")


def _call(operator: Operator) -> Iterator[str]:
    node = operator.node
    call = f"{operator.target}({argument_text(node.args, node.kwargs)})"
    where = f"  # {operator.line}" if operator.line else ""
    first, *rest = operator.outputs
    yield _row(first.name, type_of(first), f"{call}{where}")
    for variable in rest:
        yield _row(variable.name, type_of(variable), '"')


def _row(name: str, kind: str, text: str) -> str:
    return f"  {name:<24} {kind:<20} {text}"
