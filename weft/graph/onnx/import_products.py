"""Matrix products, convolutions, pooling, recurrent layers and losses of ONNX in torch."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.errors import GraphError
from weft.graph.onnx.import_operator import Attributes, ImportedOperator, plain

__all__ = ["TABLE"]

_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_MAX_POOLS = (F.max_pool1d, F.max_pool2d, F.max_pool3d)


def _gemm(attributes: Attributes, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    a = a.T if attributes.get("transA", 0) else a
    b = b.T if attributes.get("transB", 0) else b
    alpha, beta = attributes.get("alpha", 1.0), attributes.get("beta", 1.0)
    product = a @ b if alpha == 1.0 else alpha * (a @ b)
    if c is None:
        return product
    return product + (c if beta == 1.0 else beta * c)


def _pads(attributes: Attributes, sizes: Sequence[int], kernel: Sequence[int]) -> list[tuple[int, int]]:
    """Before and after each dimension; `auto_pad` makes the output as large as the input over the stride."""
    ndim, how = len(kernel), attributes.get("auto_pad", "NOTSET")
    if how in ("NOTSET", "VALID"):
        pads = attributes.get("pads", [0] * (2 * ndim)) if how == "NOTSET" else [0] * (2 * ndim)
        return [(pads[i], pads[i + ndim]) for i in range(ndim)]
    found = []
    for size, cells, step, apart in zip(sizes, kernel, *_steps(attributes, ndim), strict=True):
        total = max((-(-size // step) - 1) * step + apart * (cells - 1) + 1 - size, 0)
        less, more = total // 2, total - total // 2
        found.append((less, more) if how == "SAME_UPPER" else (more, less))
    return found


def _steps(attributes: Attributes, ndim: int) -> tuple[Sequence[int], Sequence[int]]:
    return attributes.get("strides", [1] * ndim), attributes.get("dilations", [1] * ndim)


def _padded(x: Tensor, pads: Sequence[tuple[int, int]], value: float = 0.0) -> Tensor:
    flat = [n for pair in reversed(pads) for n in pair]
    return F.pad(x, flat, value=value) if any(flat) else x


def _conv(attributes: Attributes, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    ndim = x.ndim - 2
    strides, dilations = _steps(attributes, ndim)
    given = _padded(x, _pads(attributes, x.shape[2:], weight.shape[2:]))
    convolve: Callable[..., Tensor] = _CONVOLUTIONS[ndim - 1]
    return convolve(given, weight, bias, tuple(strides), 0, tuple(dilations), attributes.get("group", 1))


def _conv_transpose(attributes: Attributes, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The whole, cut at its edges by the padding; `output_shape` and `auto_pad` say what is left instead."""
    ndim = x.ndim - 2
    strides, dilations = _steps(attributes, ndim)
    extra = attributes.get("output_padding", [0] * ndim)
    convolve: Callable[..., Tensor] = _TRANSPOSED[ndim - 1]
    whole = convolve(x, weight, bias, tuple(strides), 0, 0, attributes.get("group", 1), tuple(dilations))
    whole = _padded(whole, [(0, n) for n in extra])
    how, shape = attributes.get("auto_pad", "NOTSET"), attributes.get("output_shape", None)
    if how.startswith("SAME") and shape is None:
        shape = [n * step for n, step in zip(x.shape[2:], strides, strict=True)]
    pads = attributes.get("pads", [0] * (2 * ndim))
    for i in range(ndim):
        size = whole.shape[2 + i]
        start, length = pads[i], size - pads[i] - pads[i + ndim]
        if shape is not None:
            length = shape[-ndim:][i]
            total = max(size - length, 0)
            start = total // 2 if how != "SAME_LOWER" else total - total // 2
        whole = whole.narrow(2 + i, start, min(length, size - start))
        beyond = [(0, length - whole.shape[2 + i] if dim == i else 0) for dim in range(ndim)]
        whole = _padded(whole, beyond)
    return whole


def _max_pool(attributes: Attributes, x: Tensor) -> Tensor:
    kernel = attributes["kernel_shape"]
    ndim = len(kernel)
    strides, dilations = _steps(attributes, ndim)
    lowest = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
    pads = _ceiled(attributes, x.shape[2:], _pads(attributes, x.shape[2:], kernel))
    pool: Callable[..., Tensor] = _MAX_POOLS[ndim - 1]
    given = _padded(x, pads, lowest)
    if given.is_floating_point():
        return pool(given, tuple(kernel), tuple(strides), 0, tuple(dilations))
    return pool(given.double(), tuple(kernel), tuple(strides), 0, tuple(dilations)).to(x.dtype)


def _ceiled(attributes: Attributes, sizes: Sequence[int], pads: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """With `ceil_mode`, room for a last window that begins inside and ends outside."""
    if not attributes.get("ceil_mode", 0):
        return list(pads)
    kernel = attributes["kernel_shape"]
    found = []
    for (low, high), size, cells, step, apart in zip(
        pads, sizes, kernel, *_steps(attributes, len(kernel)), strict=True
    ):
        span = apart * (cells - 1) + 1
        count = -(-(size + low + high - span) // step) + 1
        if (count - 1) * step >= size + low:
            count -= 1
        found.append((low, max(high, (count - 1) * step + span - size - low)))
    return found


def _avg_pool(attributes: Attributes, x: Tensor) -> Tensor:
    """Sums over windows, divided by the cells that count."""
    kernel = attributes["kernel_shape"]
    strides, dilations = _steps(attributes, len(kernel))
    pads = _pads(attributes, x.shape[2:], kernel)
    room = _ceiled(attributes, x.shape[2:], pads)
    ones = torch.ones_like(x[:1, :1])
    if attributes.get("count_include_pad", 0):
        ones = _padded(ones, pads, 1.0)
        beyond = [(0, b[1] - a[1]) for a, b in zip(pads, room, strict=True)]
    else:
        beyond = room
    total = _window_sums(_padded(x, room), kernel, strides, dilations)
    return total / _window_sums(_padded(ones, beyond), kernel, strides, dilations)


def _window_sums(x: Tensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> Tensor:
    weight = torch.ones([1, 1, *kernel], dtype=x.dtype)
    convolve: Callable[..., Tensor] = _CONVOLUTIONS[len(kernel) - 1]
    flat = x.reshape(-1, 1, *x.shape[2:])
    sums = convolve(flat, weight, None, tuple(strides), 0, tuple(dilations))
    return sums.reshape(*x.shape[:2], *sums.shape[2:])


def _global(reduce: Callable[..., Tensor]) -> ImportedOperator:
    return plain(lambda x: reduce(x, tuple(range(2, x.ndim)), keepdim=True))


def _lstm(
    attributes: Attributes,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    bias: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    hidden: Tensor | None = None,
    cell: Tensor | None = None,
    peepholes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gates in the order input, output, forget, cell; one or two directions."""
    is_batch_first = bool(attributes.get("layout", 0))
    x = x.transpose(0, 1) if is_batch_first else x
    is_ragged = lengths is not None and any(length != x.shape[0] for length in lengths)
    if is_ragged or attributes.get("activations") or attributes.get("clip"):
        raise GraphError("an imported LSTM takes sequences of one length, its own activations and no clip")
    size, direction = attributes["hidden_size"], attributes.get("direction", "forward")
    results = []
    for k in range(w.shape[0]):
        reverse = direction == "reverse" or k == 1
        sums = bias[k, : 4 * size] + bias[k, 4 * size :] if bias is not None else torch.zeros(4 * size, dtype=x.dtype)
        start = torch.zeros(x.shape[1], size, dtype=x.dtype)
        given = [s if s is None or not is_batch_first else s.transpose(0, 1) for s in (hidden, cell)]
        states = [start if state is None else state[k] for state in given]
        peeps = None if peepholes is None else peepholes[k].chunk(3)
        results.append(_one_direction(x.flip(0) if reverse else x, w[k], r[k], sums, states, peeps, reverse))
    y, h, c = (torch.stack(parts, dim) for parts, dim in zip(zip(*results, strict=True), (1, 0, 0), strict=True))
    return (y.permute(2, 0, 1, 3), h.transpose(0, 1), c.transpose(0, 1)) if is_batch_first else (y, h, c)


def _one_direction(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    bias: Tensor,
    states: Sequence[Tensor],
    peepholes: Sequence[Tensor] | None,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    h, c = states
    rows = []
    for step in x:
        i, o, f, g = (step @ w.T + h @ r.T + bias).chunk(4, -1)
        if peepholes is not None:
            i, f = i + peepholes[0] * c, f + peepholes[2] * c
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        o = o if peepholes is None else o + peepholes[1] * c
        h = torch.sigmoid(o) * torch.tanh(c)
        rows.append(h)
    y = torch.stack(rows[::-1] if reverse else rows)
    return y, h, c


def _nll(attributes: Attributes, log_p: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    ignored = attributes.get("ignore_index", -100)
    how = attributes.get("reduction", "mean")
    return F.nll_loss(log_p, target.long(), weight, ignore_index=ignored, reduction=how)


def _dropout(
    _attributes: Attributes, x: Tensor, _ratio: Tensor | None = None, training: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """In inference nothing is dropped."""
    if training is not None and any(training):
        raise GraphError("an imported Dropout does not train; export the model for inference")
    return x.clone(), torch.ones_like(x, dtype=torch.bool)


TABLE: Mapping[str, ImportedOperator] = {
    "AveragePool": ImportedOperator(_avg_pool),
    "Conv": ImportedOperator(_conv),
    "ConvTranspose": ImportedOperator(_conv_transpose),
    "Dropout": ImportedOperator(_dropout, frozenset({2})),
    "Einsum": ImportedOperator(lambda attributes, *inputs: torch.einsum(attributes["equation"], *inputs)),
    "Gemm": ImportedOperator(_gemm),
    "GlobalAveragePool": _global(torch.mean),
    "GlobalMaxPool": _global(torch.amax),
    "LSTM": ImportedOperator(_lstm, frozenset({4})),
    "MatMul": plain(torch.matmul),
    "MaxPool": ImportedOperator(_max_pool),
    "NegativeLogLikelihoodLoss": ImportedOperator(_nll),
}
