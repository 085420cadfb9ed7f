"""The signature of a program: inputs that stay, state that is written over, outputs for a sink, the guard."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from weft.graph.ir.graph import Graph
from weft.graph.ir.pytree import paths_of

__all__ = ["BoundSignature", "Signature", "bind_signature"]


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of a graph that a program treats in a way of their own.

    They are named by the beginnings of their paths: `state.parameters` is all of them.

    Args:
        kept: inputs that are the same tensors from step to step; views of them are taken once.
        replaced: state that is kept, and written over by what it becomes.
        sunk: the part of the outputs, such as `gradients`, that goes to a sink as it is made.
        guard: an output, such as `loss`; where it is not finite the step ends there, and nothing after it is written.
    """

    kept: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    sunk: str = ""
    guard: str = ""


@dataclass(frozen=True)
class BoundSignature:
    """A signature in the nodes of one graph.

    Args:
        kept: numbers of the inputs that stay.
        replaced: each input that is written over, and what it becomes.
        returned: for every result, the node whose value it is; None for what goes to the sink or is in place.
        in_place: the results that are an input, after it was written over.
        sunk: the names under which a node's value goes to the sink.
        guard: the node that must be finite.
    """

    kept: tuple[int, ...]
    replaced: Mapping[fx.Node, fx.Node]
    returned: tuple[fx.Node | None, ...]
    in_place: Mapping[int, fx.Node]
    sunk: Mapping[fx.Node, tuple[str, ...]]
    guard: fx.Node | None


def bind_signature(graph: Graph, signature: Signature) -> BoundSignature:
    inputs, results = graph.placeholders, graph.result_nodes
    old = dict(paths_of(graph.arguments))
    kept = {place for path, place in old.items() if _is_under(path, signature.kept + signature.replaced)}
    paths: dict[int, list[str]] = {}
    for path, place in paths_of(graph.results):
        paths.setdefault(place, []).append(path)
    prefix = f"outputs.{signature.sunk}."
    replaced: dict[fx.Node, fx.Node] = {}
    returned: list[fx.Node | None] = list(results)
    in_place: dict[int, fx.Node] = {}
    sunk: dict[fx.Node, tuple[str, ...]] = {}
    for place, found in paths.items():
        if signature.sunk and (names := tuple(p.removeprefix(prefix) for p in found if p.startswith(prefix))):
            sunk[results[place]] = sunk.get(results[place], ()) + names
            if len(names) == len(found):
                returned[place] = None
        olds = {inputs[old[path]] for path in found if _is_under(path, signature.replaced)} - {results[place]}
        replaced.update(dict.fromkeys(olds, results[place]))
        # What is also returned elsewhere, or replaces two, cannot be the memory of one.
        if len(olds) == 1 and all(_is_under(path, signature.replaced) for path in found):
            (in_place[place],) = olds
            returned[place] = None
    guard = next((results[place] for place, found in paths.items() if f"outputs.{signature.guard}" in found), None)
    return BoundSignature(tuple(sorted(kept)), replaced, tuple(returned), in_place, sunk, guard)


def _is_under(path: str, beginnings: tuple[str, ...]) -> bool:
    return any(f"{path}.".startswith(f"{beginning}.") for beginning in beginnings)
