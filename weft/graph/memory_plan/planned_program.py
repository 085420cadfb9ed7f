"""A graph made runnable by its memory plan."""

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from weft.errors import GraphError
from weft.graph.exact_fusion import bind_kernel, fuse_exactly
from weft.graph.fusion import Region, fuse, region_of, regions_of
from weft.graph.fusion.inductor import compile_into
from weft.graph.ir.graph import Graph
from weft.graph.ir.interpreter import call_of
from weft.graph.memory_plan.arena import Arena
from weft.graph.memory_plan.planned_source import source_of
from weft.graph.memory_plan.signature import Signature, bind_signature
from weft.graph.memory_plan.storage_plan import plan_storage
from weft.graph.memory_plan.update_order import early_updates
from weft.graph.programs.generated_program import keep_source
from weft.graph.programs.program import AbstractProgram, Sink, own
from weft.torch_private import bare, below_autograd, use_no_autograd

__all__ = ["PlannedProgram", "fused_program"]

BoundStep = Callable[[Sequence[Tensor], Sink], list[Any]]
Compile = Callable[[Region, Mapping[int, int]], Callable[[list[Tensor]], Sequence[Tensor]]]

_PLAIN = Signature()


class PlannedProgram(AbstractProgram):
    """A graph as generated Python that reuses its memory, and that of the state it may write over.

    Tensors of the state that stay are looked up once: a step with others is bound anew. Two runs at the same time, from
    two threads, would share memory that is only enough for one.

    Args:
        graph: one without named sizes.
        signature: the inputs that stay or are written over, the outputs for a sink, the guard.
        compile: makes a function of a region and of the places that it is to write to.
        arena: memory that other programs use too, one at a time; by default its own.
        folder: where the generated file is kept; by default a folder of the user's cache.
    """

    def __init__(
        self,
        graph: Graph,
        signature: Signature = _PLAIN,
        *,
        compile: Compile = compile_into,
        arena: Arena | None = None,
        folder: Path | None = None,
    ) -> None:
        super().__init__(graph)
        if graph.sizes:
            raise GraphError(f"memory cannot be planned for named sizes ({', '.join(graph.sizes)}); use Program")
        bound = bind_signature(graph, signature)
        order = early_updates(graph, bound.replaced.keys(), bound.guard)
        returned = [node for node in (*bound.returned, *bound.sunk) if node is not None]
        storage = plan_storage(order, bound.replaced, returned)
        self.num_bytes = storage.num_bytes
        self.source = source_of(graph, bound, order, storage)
        self.file = keep_source(self.source, folder)
        given = [i for i in range(len(graph.placeholders)) if i not in bound.kept]
        self._kept, self._given = _picker(bound.kept), _picker(given)
        self._written = {i for i, node in enumerate(graph.placeholders) if node in bound.replaced}
        self._hands_over = bool(bound.sunk)
        self._arena = arena or Arena()
        self._compile = compile
        self._bind = _load(self.source, self.file, graph, compile)
        self._bound: tuple[Tensor, ...] = (self._arena.memory[:0],)  # to nothing yet
        self._step: BoundStep | None = None

    def step(self, inputs: Sequence[Tensor], sink: Sink) -> list[Any]:
        step = self._bound_to(inputs)
        if self._hands_over:  # and whoever takes it may do anything
            return step(self._given(inputs), sink)
        with use_no_autograd():
            return step(self._given(inputs), sink)

    def compute(self, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        region = region_of(node.target)
        return call_of(node)(*args, **kwargs) if region is None else self._compile(region, {})(list(args[0]))

    def _bound_to(self, inputs: Sequence[Tensor]) -> BoundStep:
        kept = (self._arena.memory, *self._kept(inputs))
        if self._step is None or not all(map(operator.is_, kept, self._bound)):
            _check_apart(inputs, self._written)
            memory = self._arena.reserve(self.num_bytes)
            with torch.no_grad():
                tensors = [tensor.detach() if tensor.requires_grad else tensor for tensor in self._kept(inputs)]
                self._step = self._bind(tensors, partial(_part, memory), self.graph.constants)
            self._bound = (memory, *self._kept(inputs))
        return self._step


def fused_program(
    graph: Graph, signature: Signature, *, may_round: bool, arena: Arena | None = None, folder: Path | None = None
) -> PlannedProgram:
    """A program of the graph, or of one that differs from it by rounding where it `may_round`.

    Args:
        may_round: whether results may differ from the graph's by rounding.
        arena: memory that other programs use too, one at a time; by default its own.
        folder: where the generated file is kept; by default a folder of the user's cache.
    """
    if may_round:
        return PlannedProgram(fuse(graph), signature, compile=compile_into, arena=arena, folder=folder)
    return PlannedProgram(fuse_exactly(graph), signature, compile=bind_kernel, arena=arena, folder=folder)


def _part(memory: Tensor, offset: int, shape: list[int], stride: list[int], dtype: torch.dtype) -> Tensor:
    """A tensor in the arena."""
    behind = memory[offset:]
    return behind[: len(behind) // dtype.itemsize * dtype.itemsize].view(dtype).as_strided(shape, stride)


def _picker(places: Sequence[int]) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...]]:
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda inputs: tuple(inputs[place] for place in places)


def _load(source: str, file: Path, graph: Graph, compile_region: Compile) -> Callable[..., BoundStep]:
    """Run the text just generated, never what the file has become since."""
    regions = regions_of(graph)

    def compiled(name: str, into: Mapping[int, int]) -> Callable[..., Any]:
        return compile_region(regions[name], into)

    names: dict[str, Any] = {"own": own, "copy": torch.clone, "is_finite": _is_finite, "compiled": compiled}
    names |= {"bare": bare, "below_autograd": below_autograd}
    exec(compile(source, str(file), "exec"), names)
    bind: Callable[..., BoundStep] = names["bind"]
    return bind


def _is_finite(tensor: Tensor) -> bool:
    return math.isfinite(tensor.item()) if tensor.numel() == 1 else bool(torch.isfinite(tensor).all())


def _check_apart(inputs: Sequence[Tensor], written: Collection[int]) -> None:
    """State that is written over must be memory of its own."""
    starts = sorted((tensor.data_ptr(), i) for i, tensor in enumerate(inputs) if tensor.numel())
    end = end_of_written = 0  # of all that begin before
    for begin, i in starts:
        if begin < end_of_written or (i in written and begin < end):
            raise GraphError("a tensor shares memory with another that the step writes over; clone one of them")
        own_end = begin + _extent(inputs[i])
        end = max(end, own_end)
        end_of_written = max(end_of_written, own_end) if i in written else end_of_written


def _extent(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
