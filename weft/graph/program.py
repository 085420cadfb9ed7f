"""A graph made runnable: generated Python, kept as a file that can be read."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, fx

from weft.atomic import write_text
from weft.errors import GraphError, StorageError
from weft.graph.calls import call_of
from weft.graph.code import source_of
from weft.graph.dynamic import measure
from weft.graph.executor import State
from weft.graph.fusion import compile_region, region_of, regions_of
from weft.graph.graph import Graph
from weft.graph.sizes import resolved, shape_of, strides_of
from weft.graph.structure import fill, paths_of, pick
from weft.specs import Batch
from weft.torch_private import below_autograd, shares_memory

__all__ = [
    "AbstractProgram",
    "HasPrograms",
    "MakeProgram",
    "Program",
    "Sink",
    "code_folder",
    "keep_source",
    "own",
    "refuse",
]

Sink = Callable[[str, Tensor], None]


class AbstractProgram(ABC):
    """Runs a graph. `program(state, batch, random)` gives `(outputs, new state, random)`."""

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
        """One step. Whatever is random is drawn from a generator in the state `random`, which is then moved on.

        Raises:
            GraphError: state or batch differ in form, shape or type from what was captured, or `random` is missing.
        """
        given = pick(self.graph.arguments, {"state": state, "batch": batch}, len(self._expected))
        sizes = measure(self.graph, given)
        inputs = [self._checked(place, tensor, sizes) for place, tensor in enumerate(given)]
        results, random = self.run(inputs, refuse, random)
        filled = fill(self.graph.results, results)
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


@runtime_checkable
class HasPrograms(Protocol):
    """An executor that runs graphs, and can tell which for a batch."""

    def program(self, state: State, batch: Batch, *, is_training: bool) -> AbstractProgram: ...


MakeProgram = Callable[[Graph, str], AbstractProgram]
"""From a graph, and the part of its outputs that goes to a sink, to what runs it."""


class Program(AbstractProgram):
    """A graph as generated Python.

    Args:
        sunk: a part of the outputs, such as `gradients`, that goes to a sink as it is made (see `run`).
        folder: where the generated file is kept; by default a folder of the user's cache.
    """

    def __init__(self, graph: Graph, *, sunk: str = "", folder: Path | None = None) -> None:
        super().__init__(graph)
        self.source = source_of(graph, sunk)
        self.file = keep_source(self.source, folder or code_folder())
        self._step = _load(self.source, self.file, graph)

    def step(self, inputs: Sequence[Tensor], sink: Sink) -> list[Any]:
        return self._step(inputs, sink)

    def compute(self, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        region = region_of(node.target)
        return call_of(node)(*args, **kwargs) if region is None else compile_region(region)(list(args[0]))


def code_folder() -> Path:
    """Where generated files are kept: XDG_CACHE_HOME or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "weft" / "graphs"


def keep_source(source: str, folder: Path) -> Path:
    """Write the source under a name that says its content. It is for people to read: a full disk does not matter."""
    file = folder / f"step-{hashlib.sha256(source.encode()).hexdigest()[:16]}.py"
    if not file.exists():
        with suppress(StorageError):
            write_text(file, source)
    return file


def _load(source: str, file: Path, graph: Graph) -> Callable[[Sequence[Tensor], Sink], list[Any]]:
    """What runs is the text just generated, never what the file has become since."""
    given = {"own": own, "copy": torch.clone, "below_autograd": below_autograd, "constants": graph.constants}
    regions = regions_of(graph)
    names: dict[str, Any] = {**given, "compiled": lambda name: compile_region(regions[name])}
    exec(compile(source, str(file), "exec"), names)
    step: Callable[[Sequence[Tensor], Sink], list[Any]] = names["step"]
    return step


def own(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where anything else holds its memory."""
    return tensor.clone() if shares_memory(tensor) else tensor


def refuse(path: str, _tensor: Tensor) -> None:
    raise AssertionError(f"nothing was to be handed over ({path})")
