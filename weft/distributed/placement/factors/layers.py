"""Fully connected layers whose gradients of weights are kept as factors: rows of x beside rows of dy.

    forward     y = x W^T + b
    backward    dy -> dx, db       as ever; autograd gets no gradient for W, and the hooks of W run all the same
                | x row | dy row |     one row for each sample (times positions)
                | x row | dy row |     a layer that is used again, or by the next micro-batch, appends its rows

The product is left to whoever takes the rows. Where somebody wants the gradient itself it is made as ever, and comes to
the hooks of the weight: under autocast, torch.autograd.grad, create_graph, torch.func and the compiler, for a weight
that has hooks of others, and while gradients stay on this rank (no_sync).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd import Function

from weft.distributed.placement.factors.layer_kinds import LayerKind, as_rows, is_free, kind_of
from weft.distributed.placement.factors.own_forward import OwnForward
from weft.planning.factor_cost import FactoredShape
from weft.torch_private import accumulates_in_backward, is_transformed

__all__ = ["DENSE", "FactoredLayers", "FactoredWeight"]

DENSE = -1
"""In place of a number of rows: the gradient itself will come."""

LEAST_BYTES = 1 << 13
"""Of a weight: smaller ones travel packed with others, at less than the price of a message."""

MOST_MISSED = 2
"""Backward passes that a forward is waited for; a loss that is kept and never used keeps its forward alive."""


@final
@dataclass(eq=False)
class _Use:
    """One forward of a layer, which lives as long as autograd may go back through it."""

    num_rows: int
    num_missed: int = 0


@final
@dataclass(eq=False)
class FactoredWeight:
    """The weight of a layer, or of several that share it, and the rows of a step."""

    name: str
    weight: Tensor
    layer: nn.Module
    kind: LayerKind
    blocks: list[Tensor] = field(default_factory=list)  # (rows, inputs + outputs), in the order of backward
    uses: "WeakSet[_Use]" = field(default_factory=WeakSet)  # that backward has not come to
    is_dense: bool = False  # a forward went by unseen in this step
    kept: tuple[Tensor | None, int] | None = None  # `grad` and its version, as backward came to the weight

    @property
    def shape(self) -> FactoredShape:
        num_outputs, num_inputs = reversed(self.weight.shape) if self.kind.is_transposed else self.weight.shape
        return FactoredShape(num_inputs, num_outputs)

    def count(self) -> int:
        """Rows that there are, and that are expected of forwards; or DENSE."""
        if self.is_dense:
            return DENSE
        return sum(map(len, self.blocks)) + sum(use.num_rows for use in self.uses)

    def append(self, x: Tensor, dy: Tensor, scale: float) -> None:
        x, dy, num_inputs = as_rows(x), as_rows(dy), x.shape[-1]
        block = x.new_empty((len(x), self.shape.width))
        block[:, :num_inputs] = x
        torch.mul(dy, scale, out=block[:, num_inputs:])
        self.blocks.append(block)

    def take(self) -> Tensor:
        """The rows, which are let go; those that are still expected may come in a later backward."""
        blocks, self.blocks, self.is_dense = self.blocks, [], False
        for use in list(self.uses):
            use.num_missed += 1
            if use.num_missed == MOST_MISSED:
                self.uses.discard(use)
        if len(blocks) == 1:
            return blocks[0]
        return torch.cat(blocks) if blocks else self.weight.new_empty((0, self.shape.width))

    def multiply(self, rows: Tensor, total: Tensor | None = None) -> Tensor:
        """The gradient of these rows, added to a total in place where one is given."""
        num_inputs = self.shape.num_inputs
        if not len(rows) and total is None:
            return torch.zeros_like(self.weight, requires_grad=False)
        return self.kind.to_weight(self.layer, rows[:, :num_inputs], rows[:, num_inputs:], total)

    def note_grad(self) -> None:
        grad = self.weight.grad
        self.kept = (grad, 0 if grad is None else grad._version)

    def is_grad_kept(self) -> bool:
        """Whether `grad` is as it was when backward came to the weight: none but the rows are of this backward. May be
        asked once in a backward, by a hook of the weight."""
        kept, self.kept = self.kept, None
        grad = self.weight.grad
        return kept is not None and kept[0] is grad and (grad is None or grad._version == kept[1])


@final
class FactoredLayers:
    """The layers of a module whose gradients may be sent as factors, each with its rows.

    Attributes:
        scale: by which gradients of the present backward are multiplied.
        is_held: whether gradients of the present backward stay on this rank.
        is_own_hook: whether a hook of a weight does no more than `scale`.
    """

    def __init__(self) -> None:
        self.weights: dict[str, FactoredWeight] = {}
        self.scale: Callable[[], float] = lambda: 1.0
        self.is_held: Callable[[], bool] = lambda: False
        self.is_own_hook: Callable[[Any], bool] = lambda hook: False

    def find(self, modules: Sequence[nn.Module], names: Mapping[int, str]) -> list[nn.Module]:
        """Look for layers and stand in for their forwards.

        Args:
            names: of parameters that are trained, by id; others are left alone.

        Returns:
            The layers, whose own attribute `forward` it is.
        """
        found = {key: layers for key, layers in _holders(modules).items() if key in names and _is_product(key, layers)}
        for key, layers in found.items():
            kind = kind_of(layers[0])
            assert kind is not None, "a layer that makes a product"
            entry = FactoredWeight(names[key], layers[0].get_parameter("weight"), layers[0], kind)
            self.weights[entry.name] = entry
            for layer in layers:
                vars(layer)["forward"] = OwnForward(layer, partial(self._forward, entry))
        return [layer for layers in found.values() for layer in layers]

    def begin(self) -> None:
        """Forget what an earlier step has left."""
        for entry in self.weights.values():
            entry.blocks, entry.is_dense = [], False
            entry.uses.clear()

    def _forward(self, entry: FactoredWeight, layer: Any, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or not self._takes_rows(layer.weight, x):
            entry.is_dense |= torch.is_grad_enabled()
            return entry.kind.forward(layer, x, layer.weight, layer.bias)
        y: Tensor = _Product.apply(x, layer.weight, layer.bias, self, entry)  # type: ignore[no-untyped-call]
        return y

    def _takes_rows(self, weight: Tensor, x: Tensor) -> bool:
        if x.dtype != weight.dtype or torch.is_autocast_enabled(x.device.type) or is_transformed():
            return False
        before, after = weight._backward_hooks, weight._post_accumulate_grad_hooks
        return all(map(self.is_own_hook, (before or {}).values())) and len(after or ()) <= 1


@final
class _Product(Function):
    """A linear layer, whose weight gets rows in place of a gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layers: FactoredLayers, entry: FactoredWeight
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layers, ctx.entry = layers, entry
        ctx.use = _Use(x.numel() // x.shape[-1])
        entry.uses.add(ctx.use)
        return entry.kind.forward(entry.layer, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (x, weight) = gradients, ctx.saved_tensors
        entry: FactoredWeight = ctx.entry
        assert entry.kind.to_input is not None, "a kind with factors"
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        to_x = entry.kind.to_input(dy, weight) if needs_x else None
        to_bias = entry.kind.to_bias(entry.layer, dy) if needs_bias else None
        to_weight = None
        entry.uses.discard(ctx.use)
        if needs_weight and _keeps_rows(ctx):
            entry.note_grad()
            entry.append(x, dy, ctx.layers.scale())
        elif needs_weight:
            to_weight = entry.kind.to_weight(entry.layer, x, dy, None)
        return to_x, to_weight, to_bias, None, None


def _keeps_rows(ctx: Any) -> bool:
    if torch.is_grad_enabled() or ctx.layers.is_held():
        return False
    return accumulates_in_backward(ctx.next_functions[1][0])


def _holders(modules: Sequence[nn.Module]) -> dict[int, list[nn.Module]]:
    """Modules that have a parameter as their own, by its id; one that has it under two names twice."""
    found: dict[int, list[nn.Module]] = {}
    seen = {id(module): module for root in modules for module in root.modules()}
    for module in seen.values():
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), []).append(module)
    return found


def _is_product(key: int, layers: Sequence[nn.Module]) -> bool:
    """Whether all that have the parameter of this id use it as the weight of a linear layer, in one orientation."""
    kinds = [kind_of(layer) for layer in layers]
    first = kinds[0]
    if first is None or first.to_input is None or any(kind is not first for kind in kinds):
        return False
    weight = layers[0]._parameters.get("weight")
    return (
        id(weight) == key
        and type(weight) is nn.Parameter
        and all(layer._parameters.get("weight") is weight and is_free(layer) for layer in layers)
        and weight.requires_grad
        and weight.nbytes >= LEAST_BYTES
    )
