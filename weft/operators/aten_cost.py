"""The cost of ATen's operators, derived from shapes, and of a whole call, counted while it runs once.

FLOPs of matrix products, convolutions and attention are those of torch's own counter. An element-wise function counts
its arithmetic as the formula is written, where exp, log, tanh, sqrt and a division are one each. Scratch memory inside
ATen's kernels is not known and counts as none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.operators.cost import Cost, CostFormula, tensor_bytes
from weft.torch_private import leave_compiler_alone

__all__ = ["CountedCost", "cost_of", "count_cost", "register_cost"]

aten = torch.ops.aten

FlopFormula = Callable[..., int]
"""Takes the arguments of the operator, and its result as `out`."""


def _convolution(x: Tensor, weight: Tensor, bias: Any, *settings: Any, out: Tensor) -> int:
    is_transposed = bool(settings[3])
    positions = x.numel() if is_transposed else out.numel()
    return 2 * positions * (weight.numel() // max(weight.shape[0], 1))


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *settings: Any, out: Sequence[Tensor | None]
) -> int:
    is_transposed, wanted = bool(settings[3]), settings[6]
    positions = x.numel() if is_transposed else grad.numel()
    return 2 * positions * (weight.numel() // max(weight.shape[0], 1)) * (bool(wanted[0]) + bool(wanted[1]))


def _attention(query: Tensor, key: Tensor, value: Tensor, *settings: Any, out: Any) -> int:
    heads, num_queries, num_keys = prod(query.shape[:-2]), query.shape[-2], key.shape[-2]
    return 2 * heads * num_queries * num_keys * (query.shape[-1] + value.shape[-1])


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *settings: Any, out: Any) -> int:
    """Five products: the scores again, and the gradients of value, probabilities, query and key."""
    heads, num_queries, num_keys = prod(query.shape[:-2]), query.shape[-2], key.shape[-2]
    return 2 * heads * num_queries * num_keys * (3 * query.shape[-1] + 2 * value.shape[-1])


def _recurrent(products: int) -> FlopFormula:
    """One layer in one direction; the input is (time, batch, features), each step applies both weights once."""

    def flops(x: Tensor, input_weight: Tensor, hidden_weight: Tensor, *rest: Any, out: Any) -> int:
        return 2 * products * x.shape[0] * x.shape[1] * (input_weight.numel() + hidden_weight.numel())

    return flops


def _pooling(num_dims: int) -> FlopFormula:
    def flops(x: Tensor, kernel: Sequence[int], *settings: Any, out: Any) -> int:
        results = out[0] if isinstance(out, (tuple, list)) else out
        return int(results.numel()) * prod(kernel if len(kernel) == num_dims else [kernel[0]] * num_dims)

    return flops


def _per_input(count: int) -> FlopFormula:
    return lambda x, *rest, out: count * x.numel()


def _named(names: str) -> frozenset[Any]:
    return frozenset(getattr(aten, name) for name in names.split())


PRODUCTS: Mapping[Any, FlopFormula] = {
    aten.mm: lambda a, b, out: 2 * a.shape[0] * a.shape[1] * b.shape[1],
    aten.addmm: lambda c, a, b, out, **scales: 2 * a.shape[0] * a.shape[1] * b.shape[1],
    aten.bmm: lambda a, b, out: 2 * a.numel() * b.shape[2],
    aten.baddbmm: lambda c, a, b, out, **scales: 2 * a.numel() * b.shape[2],
    aten.mv: lambda a, b, out: 2 * a.numel(),
    aten.dot: lambda a, b, out: 2 * a.numel(),
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten.mkldnn_rnn_layer: _recurrent(1),
    aten.mkldnn_rnn_layer_backward: _recurrent(2),
}

# Operations for each element of the first input. A norm: mean 1, sum of squares 3, normalise 2, scale and shift 2.
PER_INPUT: Mapping[Any, int] = {
    aten._softmax: 5,
    aten._log_softmax: 5,
    aten._softmax_backward_data: 4,
    aten._log_softmax_backward_data: 4,
    aten.native_layer_norm: 8,
    aten.native_group_norm: 8,
    aten.native_batch_norm: 8,
    aten._native_batch_norm_legit: 8,
    aten._native_batch_norm_legit_no_training: 4,
    aten.native_layer_norm_backward: 14,
    aten.native_group_norm_backward: 14,
    aten.native_batch_norm_backward: 14,
    aten.mse_loss: 3,
    aten.var: 4,
    aten.var_mean: 4,
    aten.std: 4,
    aten.linalg_vector_norm: 2,
    aten.logsumexp: 4,
    aten.embedding_dense_backward: 1,
    aten._adaptive_avg_pool2d: 1,
    aten._adaptive_avg_pool2d_backward: 1,
    aten.avg_pool2d_backward: 1,
    aten.max_pool2d_with_indices_backward: 1,
    aten.nll_loss_forward: 0,  # one term a row, read by its index
    aten.nll_loss_backward: 0,
    **dict.fromkeys(
        _named("sum mean prod amax amin max min argmax argmin cumsum cumprod any all topk sort"),
        1,
    ),
}

# Operations for each element of the result, of element-wise functions that take more than one.
PER_RESULT: Mapping[Any, int] = {
    aten.sigmoid: 3,
    aten.silu: 4,
    aten.gelu: 5,
    aten.softplus: 3,
    aten.addcmul: 3,
    aten.addcdiv: 3,
    aten.lerp: 3,
    aten.sigmoid_backward: 3,
    aten.silu_backward: 8,
    aten.gelu_backward: 10,
    aten.tanh_backward: 3,
    aten.rsqrt: 2,
}

MOVES = _named(
    "clone copy_ copy _to_copy cat stack index_select gather index where fill fill_ zero_ zeros ones full arange "
    "zeros_like ones_like full_like new_zeros new_ones new_full scalar_tensor constant_pad_nd flip roll repeat scatter "
    "slice_scatter select_scatter masked_fill slice_backward select_backward embedding tril triu contiguous lift_fresh "
    "_unsafe_view native_dropout bernoulli_"
)
EMPTY = _named("empty empty_like empty_strided new_empty new_empty_strided")
# The first argument of these is a table of which only the rows that are asked for are read.
LOOK_UPS = _named("embedding index_select gather index")

FORMULAS: dict[Any, FlopFormula] = {
    **PRODUCTS,
    **{operator: _per_input(count) for operator, count in PER_INPUT.items()},
    aten.mse_loss_backward: lambda grad, x, target, *rest, out: 3 * x.numel(),
    aten.max_pool2d_with_indices: _pooling(2),
    aten.max_pool3d_with_indices: _pooling(3),
    aten.avg_pool2d: _pooling(2),
    aten.avg_pool3d: _pooling(3),
}

_custom: dict[Any, CostFormula] = {}


def register_cost(operator: Any, formula: CostFormula) -> None:
    """State the cost of an operator that the table lacks.

    Args:
        operator: a packet, such as `torch.ops.custom.swish`.
        formula: takes what the operator takes.
    """
    _custom[operator] = formula


def cost_of(operator: Any, arguments: Sequence[Any], options: Mapping[str, Any], result: Any) -> Cost | None:
    """The cost of one call of an ATen or custom operator, from shapes; None where nothing is known of it.

    Args:
        operator: an overload, such as `torch.ops.aten.mm.default`.
        arguments, options, result: of the call; tensors may be without values.

    >>> a, b = torch.empty(2, 3), torch.empty(3, 5)
    >>> cost_of(aten.mm.default, (a, b), {}, a @ b)
    Cost(flops=60, bytes_read=84, bytes_written=40, workspace=0)
    """
    packet = getattr(operator, "overloadpacket", operator)
    if packet in _custom:
        return _custom[packet](*arguments, **options)
    if packet in EMPTY or getattr(operator, "is_view", False):
        return Cost(0, 0, 0)
    flops = _flops(operator, packet, arguments, options, result)
    if flops is None:
        return None
    written = tensor_bytes(*_tensors(result))
    inputs = _tensors((arguments, options))
    if packet in LOOK_UPS:
        return Cost(flops, tensor_bytes(*inputs[1:]) + written, written)
    return Cost(flops, tensor_bytes(*inputs), written)


@dataclass(frozen=True)
class CountedCost:
    """The sum over the operators of a call, and the names of those that nothing is known of."""

    total: Cost
    unknown: tuple[str, ...]


def count_cost(function: Callable[[], object]) -> CountedCost:
    """Run a function once, and count the cost of all operators that it calls; nothing is fused."""
    counter = _Counter()
    with counter:
        function()
    return CountedCost(counter.total, tuple(sorted(counter.unknown)))


def _flops(operator: Any, packet: Any, arguments: Sequence[Any], options: Mapping[str, Any], result: Any) -> int | None:
    if packet in FORMULAS:
        scalars = {key: value for key, value in options.items() if key in ("alpha", "beta")}
        return int(FORMULAS[packet](*arguments, out=result, **(scalars if packet in PRODUCTS else {})))
    if packet in MOVES:
        return 0
    in_place = getattr(aten, packet.__name__[:-1], None) if packet.__name__.endswith("_") else None
    if torch.Tag.pointwise in getattr(operator, "tags", ()):
        each = PER_RESULT.get(packet, PER_RESULT.get(in_place, 1))
        return each * sum(tensor.numel() for tensor in _tensors(result))
    return None


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


@leave_compiler_alone
class _Counter(TorchDispatchMode):
    """Adds up what runs in the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = Cost(0, 0, 0)
        self.unknown: set[str] = set()

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        result = operator(*arguments, **(options or {}))
        cost = cost_of(operator, arguments, options or {}, result)
        if cost is None:
            self.unknown.add(str(operator))
        else:
            self.total += cost
        return result
