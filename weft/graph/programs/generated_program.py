"""A graph as generated Python, kept as a file that can be read."""

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from weft.atomic import write_text
from weft.errors import StorageError
from weft.graph.fusion import compile_region, region_of, regions_of
from weft.graph.ir.graph import Graph
from weft.graph.ir.interpreter import call_of
from weft.graph.programs.program import AbstractProgram, Sink, own
from weft.graph.programs.python_source import source_of
from weft.torch_private import below_autograd

__all__ = ["Program", "code_folder", "keep_source"]


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
