"""Operators for which there is one kernel: products with sums, and convolutions with what follows them.

The kernel rounds once less, or adds up in another order: each side is within m * eps * sum |products| of the true
value, where m is the number of operations for one element.

Batch norm at inference is a scale and a shift for each channel, so it can be a part of weight and bias:

    (conv(x, w, b) - mean) * s + beta  =  conv(x, w * s, (b - mean) * s + beta)      with s = gamma / sqrt(var + eps)
"""

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from weft.graph.ir.memory_layout import has_known_shape, layout_of
from weft.graph.rewrites.pattern import Anything, Call, Found, Number, Op, Var, add, arguments_of, find, mm, only
from weft.graph.rewrites.price import price_of_node
from weft.graph.rewrites.rule import Rule, instantiate, pattern_rule, replace_with

__all__ = ["FUSIONS"]

aten = torch.ops.aten

addmm, addcmul, addcdiv = Op((aten.addmm.default,)), Op((aten.addcmul.default,)), Op((aten.addcdiv.default,))
convolution, view = Op((aten.convolution.default,)), Op((aten.view.default,))
relu, inverse_root = Op((aten.relu.default,)), Op((aten.rsqrt.default,))

x, y, z, w, k = Var("x"), Var("y"), Var("z"), Var("w"), Number("k")
bias, gamma, beta, mean, variance = Anything("b"), Var("gamma"), Var("beta"), Var("mean"), Var("variance")
stride, padding, dilation, groups = Anything("stride"), Anything("padding"), Anything("dilation"), Anything("groups")
settings = (stride, padding, dilation, False, Anything("output_padding"), groups)  # False: not transposed

_NORMS = (aten.native_batch_norm.default, aten._native_batch_norm_legit_no_training.default)


def _row(name: str, pattern: Call, replacement: Call) -> Rule:
    """A row for operands of one floating type: these kernels do not promote."""

    def of_one_type(found: Found) -> Call | None:
        types = {value.meta["val"].dtype for value in found.values() if isinstance(value, fx.Node)}
        return replacement if len(types) == 1 and types.pop().is_floating_point else None

    return pattern_rule(name, pattern, of_one_type, is_exact=False, is_cheaper=True)


def _with_bias(found: Found) -> Call | None:
    """The channels are the second dimension of an image, so a bias stands there as [C, 1, 1] or [1, C, 1, 1]."""
    channels, ones = found["w"].meta["val"].shape[0], [1] * (found["x"].meta["val"].dim() - 2)
    is_bias = list(found["z"].meta["val"].shape) in ([channels, *ones], [1, channels, *ones])
    return convolution(x, w, view(z, [channels]), *settings) if is_bias else None


def fold_batch_norm(nodes: fx.Graph, _constants: dict[str, Tensor]) -> int:
    """Make batch norm with fixed statistics a part of the convolution before it, where that is cheaper."""
    count = 0
    for target in _NORMS:
        for norm in nodes.find_nodes(op="call_function", target=target):
            found = _foldable(norm)
            shown = [user for user in norm.users if user.args[1] == 0]
            if found is None or len(shown) != 1 or len(norm.users) != 1:
                continue
            new = instantiate(_folded(found), found, shown[0])
            price = price_of_node(norm) + price_of_node(found["convolution"])
            if new is None or new.price >= price or layout_of(new.value) != layout_of(shown[0].meta["val"]):
                continue
            replace_with(nodes, shown[0], new)
            for gone in (shown[0], norm, found["convolution"]):
                nodes.erase_node(gone)
            count += 1
    return count


def _foldable(norm: fx.Node) -> dict[str, Any] | None:
    """The values of the names, where the statistics are fixed and nobody else reads the convolution."""
    given = arguments_of(norm)
    names = {"gamma": "weight", "beta": "bias", "mean": "running_mean", "variance": "running_var"}
    statistics = {name: given[key] for name, key in names.items()}
    is_fixed = not given.get("training", False) and all(isinstance(value, fx.Node) for value in statistics.values())
    source = given["input"]
    if not is_fixed or len(source.users) != 1 or any(user.target is not operator.getitem for user in norm.users):
        return None
    for found, _ in find(convolution(x, w, bias, *settings), source):
        return {**found, **statistics, "eps": given["eps"], "convolution": source}
    return None


def _folded(found: Found) -> Call:
    shape = [found["w"].meta["val"].shape[0], *[1] * (found["w"].meta["val"].dim() - 1)]
    scale = gamma * inverse_root(variance + found["eps"])
    shift = mean * scale if found["b"] is None else (mean - Var("b")) * scale
    return convolution(x, w * view(scale, shape), beta - shift, *settings)


def fuse_relu(nodes: fx.Graph, _constants: dict[str, Tensor]) -> int:
    """Let oneDNN apply the relu while it writes the result of a convolution, where it is there to do so."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_convolution_pointwise"):
        return 0
    fused = Op((torch.ops.mkldnn._convolution_pointwise.default,))
    pattern = relu(only(convolution(x, w, bias, *settings)))
    template = fused(x, w, bias, padding, stride, dilation, groups, "relu", [], "")
    count = 0
    for node in nodes.find_nodes(op="call_function", target=aten.relu.default):
        for found, calls in find(pattern, node):
            new = instantiate(template, found, node) if node.users and _is_plain(found) else None
            if new is not None:
                # PyTorch notes the strides of another memory format for this operator; it keeps that of its input.
                replace_with(nodes, node, replace(new, value=node.meta["val"]))
                for gone in calls:
                    nodes.erase_node(gone)
                count += 1
    return count


def _is_plain(found: Found) -> bool:
    image, weight = (found[name].meta["val"] for name in ("x", "w"))
    if image.dim() != 4 or not has_known_shape(image):
        return False
    return all(value.dtype == torch.float32 and value.is_contiguous() for value in (image, weight))


FUSIONS: tuple[Rule, ...] = (
    _row("product plus matrix", only(mm(x, y)) + z, addmm(z, x, y)),
    _row("matrix plus scaled product", add(z, only(mm(x, y)), alpha=k), addmm(z, x, y, alpha=k)),
    _row("product plus scaled matrix", add(only(mm(x, y)), z, alpha=k), addmm(z, x, y, beta=k)),
    _row("matrix minus product", z - only(mm(x, y)), addmm(z, x, y, alpha=-1)),
    _row("product minus matrix", only(mm(x, y)) - z, addmm(z, x, y, beta=-1)),
    _row("sum with a product", z + only(x * y), addcmul(z, x, y)),
    _row("sum with a scaled product", add(z, only(x * y), alpha=k), addcmul(z, x, y, value=k)),
    _row("difference from a product", z - only(x * y), addcmul(z, x, y, value=-1)),
    _row("sum with a quotient", z + only(x / y), addcdiv(z, x, y)),
    _row("sum with a scaled quotient", add(z, only(x / y), alpha=k), addcdiv(z, x, y, value=k)),
    _row("difference from a quotient", z - only(x / y), addcdiv(z, x, y, value=-1)),
    pattern_rule(
        "convolution plus bias",
        only(convolution(x, w, None, *settings)) + z,
        _with_bias,
        is_exact=False,
        is_cheaper=True,
    ),
    Rule("batch norm into convolution", fold_batch_norm, is_exact=False),
    Rule("convolution then relu", fuse_relu, is_exact=False),
)
