"""A call of every operator in the JAX table: arguments for which it must give what ATen gives."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["SAMPLES", "Sample"]

Sample = tuple[tuple[Any, ...], dict[str, Any]]


def draw(*shape: int) -> Tensor:
    """Values whose order, sign and spread vary, never on the edge of a piecewise function."""
    count = torch.tensor(shape).prod().item() if shape else 1
    return ((torch.arange(count, dtype=torch.float64) * 0.7 + 0.3).sin() * 2).reshape(shape)


X, Y, SQUARE = draw(2, 3, 4), draw(2, 3, 4).flip(0), draw(3, 3)
POSITIVE, UNIT = X.abs() + 0.1, X.tanh()
MASK = X > 0
ROWS = torch.tensor([[1, 0, 2], [2, 2, 0]])
LABELS = torch.tensor([1, -100, 0, 3])
IMAGE = draw(2, 4, 6, 5)
F64 = {"dtype": torch.float64}


def call(*args: Any, **kwargs: Any) -> Sample:
    return args, kwargs


def attention(causal: bool, **options: Any) -> Sample:
    return call(draw(2, 2, 5, 4), draw(2, 2, 5, 4).flip(2), draw(2, 2, 5, 4).flip(3), 0.0, causal, **options)


def attention_backward(causal: bool, **options: Any) -> Sample:
    inputs, kwargs = attention(causal, **options)
    out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*inputs, **kwargs)
    return call(out.cos(), *inputs[:3], out, total, 0.0, causal, **kwargs)


CONVOLUTIONS = [
    ((2, 4, 6, 5), (6, 4, 3, 2), ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)),
    ((2, 4, 6, 5), (6, 2, 3, 3), ([2, 1], [1, 2], [1, 1], False, [0, 0], 2)),
    ((2, 4, 6, 5), (6, 4, 3, 2), ([1, 2], [2, 1], [2, 1], False, [0, 0], 1)),
    ((2, 4, 6, 5), (4, 3, 3, 2), ([2, 1], [1, 0], [1, 1], True, [1, 0], 1)),
    ((2, 4, 6, 5), (4, 3, 3, 2), ([2, 2], [1, 1], [1, 2], True, [0, 1], 2)),
    ((2, 4, 6), (6, 4, 3), ([2], [1], [1], False, [0], 1)),
]


def convolutions() -> list[Sample]:
    made = []
    for x, w, settings in CONVOLUTIONS:
        outputs = w[1] * settings[5] if settings[3] else w[0]
        made.append(call(draw(*x), draw(*w), draw(outputs), *settings))
    return made


def convolutions_backward() -> list[Sample]:
    made = []
    for args, _ in convolutions():
        y = torch.ops.aten.convolution(*args)
        made.append(call(y.cos(), args[0], args[1], [args[2].numel()], *args[3:], [True, True, True]))
    return made


POOLS: list[tuple[Any, ...]] = [([2, 2],), ([3, 2], [2, 1], [1, 1]), ([3, 3], [2, 2], [1, 1], [1, 1], True)]
AVERAGES: list[tuple[Any, ...]] = [
    ([2, 2], [], [0, 0], False, True, None),
    ([3, 2], [2, 1], [1, 1], False, True, None),
    ([3, 3], [2, 2], [1, 1], True, False, None),
    ([2, 2], [2, 2], [0, 0], False, True, 3),
]


def max_pools_backward() -> list[Sample]:
    made = []
    for kernel, *rest in POOLS:
        missing: tuple[Any, ...] = (kernel, [0, 0], [1, 1], False)
        settings = kernel, *rest, *missing[len(rest) :]
        y, index = torch.ops.aten.max_pool2d_with_indices(IMAGE, *settings)
        made.append(call(y.cos(), IMAGE, *settings, index))
    return made


def average_pools_backward() -> list[Sample]:
    return [call(torch.ops.aten.avg_pool2d(IMAGE, *pool).cos(), IMAGE, *pool) for pool in AVERAGES]


def layer_norm_backward() -> list[Sample]:
    made = []
    for weight in (draw(3, 4), None):
        y, mean, scale = torch.ops.aten.native_layer_norm(X, [3, 4], weight, weight, 1e-5)
        made.append(
            call(y.cos(), X, [3, 4], mean, scale, weight, weight, [True, weight is not None, weight is not None])
        )
    return made


STATISTICS = draw(4), draw(4).abs() + 0.5


def batch_norm(training: bool) -> Sample:
    return call(IMAGE, draw(4), draw(4).flip(0), *STATISTICS, training, 0.1, 1e-5)


def batch_norm_backward(training: bool) -> Sample:
    args, _ = batch_norm(training)
    y, mean, scale, *_ = torch.ops.aten._native_batch_norm_legit_functional(*args)
    return call(y.cos(), IMAGE, args[1], *STATISTICS, mean, scale, training, 1e-5, [True, True, True])


def losses() -> list[Sample]:
    log_p, weight = draw(4, 5).log_softmax(1), draw(5).abs()
    return [call(log_p, LABELS, w, reduction, -100) for w in (None, weight) for reduction in (0, 1, 2)]


def losses_backward() -> list[Sample]:
    made = []
    for args, _ in losses():
        loss, total = torch.ops.aten.nll_loss_forward(*args)
        made.append(call(loss.cos(), *args, total))
    return made


def over_reductions(*rest: Any) -> list[Sample]:
    return [call(X, Y, reduction, *rest) for reduction in (0, 1, 2)]


def backward_over_reductions(*rest: Any) -> list[Sample]:
    return [call(draw(2, 3, 4) if r == 0 else torch.tensor(0.7).double(), X, Y, r, *rest) for r in (0, 1, 2)]


def one(*args: Any, **kwargs: Any) -> list[Sample]:
    return [call(*args, **kwargs)]


def unary(names: str, *inputs: Tensor) -> dict[str, list[Sample]]:
    return {f"aten.{name}.default": [call(x) for x in inputs] for name in names.split()}


def binary(names: str) -> dict[str, list[Sample]]:
    kinds = {"Tensor": call(X, Y), "Scalar": call(X, 1.5)}
    return {f"aten.{name}.{kind}": [sample] for name in names.split() for kind, sample in kinds.items()}


SAMPLES: dict[str, list[Sample]] = {
    **unary("abs ceil cos erf exp expm1 floor gelu isnan neg relu round sgn sigmoid sign silu sin tan tanh", X),
    **unary("log log1p reciprocal rsqrt sqrt", POSITIVE),
    **unary("alias clone contiguous detach detach_copy lift_fresh_copy elu hardtanh leaky_relu softplus", X),
    **unary("logical_not bitwise_not", MASK),
    **binary("eq ne lt le gt ge div mul remainder"),
    "aten._adaptive_avg_pool2d.default": [call(IMAGE, [1, 1]), call(IMAGE, [4, 3])],
    "aten._adaptive_avg_pool2d_backward.default": [call(draw(2, 4, 1, 1), IMAGE), call(draw(2, 4, 4, 3), IMAGE)],
    "aten._log_softmax.default": [call(X, 1, False), call(X, -1, False)],
    "aten._log_softmax_backward_data.default": one(Y, X.log_softmax(1), 1, torch.float64),
    "aten._native_batch_norm_legit.no_stats": one(IMAGE, draw(4), draw(4), True, 0.1, 1e-5),
    "aten._native_batch_norm_legit_functional.default": [batch_norm(True), batch_norm(False)],
    "aten._native_batch_norm_legit_no_training.default": one(IMAGE, draw(4), draw(4), *STATISTICS, 0.1, 1e-5),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": [
        attention(False),
        attention(True),
        attention(False, attn_mask=draw(5, 5), scale=0.3),
    ],
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": [
        attention_backward(False),
        attention_backward(True),
        attention_backward(False, attn_mask=draw(5, 5), scale=0.3),
    ],
    "aten._softmax.default": one(X, 1, False),
    "aten._softmax_backward_data.default": one(Y, X.softmax(1), 1, torch.float64),
    "aten._to_copy.default": one(X, dtype=torch.float32),
    "aten._unsafe_view.default": one(X, [4, 6]),
    "aten.add.Tensor": [call(X, Y), call(X, Y[0], alpha=2.5), call(ROWS, 1.5)],
    "aten.add.Scalar": one(X, 2, 3),
    "aten.addcdiv.default": one(X, Y, POSITIVE, value=0.3),
    "aten.addcmul.default": one(X, Y, POSITIVE, value=0.3),
    "aten.addmm.default": [
        call(draw(5), draw(3, 4), draw(4, 5)),
        call(draw(5), draw(3, 4), draw(4, 5), beta=0.5, alpha=2),
    ],
    "aten.all.default": one(MASK),
    "aten.all.dim": one(MASK, 1, True),
    "aten.all.dims": one(MASK, [0, 1]),
    "aten.amax.default": [call(X), call(X, [0, 2], True)],
    "aten.amin.default": [call(X), call(X, [1])],
    "aten.any.default": one(MASK),
    "aten.any.dim": one(MASK, 1, True),
    "aten.any.dims": one(MASK, [0, 1]),
    "aten.arange.default": one(5, **F64),
    "aten.arange.start": one(1, 5, **F64),
    "aten.arange.start_step": one(1, 9, 2, dtype=torch.int64),
    "aten.argmax.default": [call(X), call(X, 1, True)],
    "aten.argmin.default": [call(X), call(X, -1)],
    "aten.avg_pool2d.default": [call(IMAGE, *pool) for pool in AVERAGES],
    "aten.avg_pool2d_backward.default": average_pools_backward(),
    "aten.baddbmm.default": one(draw(2, 3, 5), draw(2, 3, 4), draw(2, 4, 5), beta=0.5, alpha=2),
    "aten.bitwise_and.Scalar": one(ROWS, 3),
    "aten.bitwise_and.Tensor": one(MASK, Y > 0),
    "aten.bitwise_or.Scalar": one(ROWS, 1),
    "aten.bitwise_or.Tensor": one(MASK, Y > 0),
    "aten.bmm.default": one(draw(2, 3, 4), draw(2, 4, 5)),
    "aten.cat.default": [call([X, Y], 1), call([torch.empty(0).double(), SQUARE], 0)],
    "aten.clamp.Tensor": one(X, Y.minimum(X) + 0.1, None),
    "aten.clamp.default": [call(X, -0.5, 0.5), call(X, None, 0.2), call(X, 0.1)],
    "aten.clamp_max.default": one(X, 0.2),
    "aten.clamp_min.default": one(X, 0.2),
    "aten.constant_pad_nd.default": [call(X, [1, 2, 0, 1], 0.5), call(X, [-1, 1])],
    "aten.convolution.default": convolutions(),
    "aten.convolution_backward.default": convolutions_backward(),
    "aten.copy.default": one(X, Y[0]),
    "aten.cumsum.default": one(X, 1),
    "aten.div.Scalar_mode": one(X, 0.3, rounding_mode="floor"),
    "aten.div.Tensor": [call(X, POSITIVE), call(ROWS, 2)],
    "aten.div.Tensor_mode": [call(X, POSITIVE, rounding_mode=m) for m in ("trunc", "floor", None)],
    "aten.dot.default": one(draw(5), draw(5).flip(0)),
    "aten.elu_backward.default": [call(Y, 0.5, 1.0, 1.0, False, X), call(Y, 0.5, 1.0, 1.0, True, X.tanh() * 0.4)],
    "aten.embedding.default": one(draw(4, 3), ROWS),
    "aten.embedding_dense_backward.default": [
        call(draw(2, 3, 5), ROWS, 4, -1, False),
        call(draw(2, 3, 5), ROWS, 4, 2, False),
        call(draw(2, 3, 5), ROWS, 4, -1, True),
    ],
    "aten.expand.default": [call(draw(3, 1), [2, -1, 4]), call(draw(1), [3])],
    "aten.flip.default": one(X, [0, 2]),
    "aten.full.default": one([2, 3], 1.5, **F64),
    "aten.full_like.default": one(X, 1.5),
    "aten.gather.default": one(draw(3, 4), 1, torch.tensor([[0, 3], [1, 1], [2, 0]])),
    "aten.gelu.default": [call(X), call(X, approximate="tanh")],
    "aten.gelu_backward.default": [call(Y, X), call(Y, X, approximate="tanh")],
    "aten.hardtanh_backward.default": one(Y, X, -0.5, 0.5),
    "aten.index.Tensor": [call(draw(3, 4), [torch.tensor([0, 2])]), call(draw(3, 4), [None, torch.tensor([[1], [3]])])],
    "aten.index_put.default": [
        call(draw(3, 4), [torch.tensor([0, 2])], draw(2, 4)),
        call(draw(3, 4), [torch.tensor([1, 1])], draw(2, 4), True),
    ],
    "aten.index_select.default": one(X, 1, torch.tensor([2, 0])),
    "aten.leaky_relu_backward.default": one(Y, X, 0.1, False),
    "aten.lerp.Scalar": one(X, Y, 0.3),
    "aten.lerp.Tensor": one(X, Y, POSITIVE),
    "aten.linalg_vector_norm.default": [call(X), call(X, 1, [1]), call(X, float("inf"), [0, 1], True), call(X, 3)],
    "aten.logical_and.default": one(MASK, Y > 0),
    "aten.logical_or.default": one(MASK, Y > 0),
    "aten.logsumexp.default": one(X, [1], True),
    "aten.masked_fill.Scalar": one(X, MASK, -1.5),
    "aten.masked_fill.Tensor": one(X, MASK, torch.tensor(-1.5).double()),
    "aten.max.default": one(X),
    "aten.max.dim": one(X, 1, True),
    "aten.max_pool2d_with_indices.default": [call(IMAGE, *pool) for pool in POOLS],
    "aten.max_pool2d_with_indices_backward.default": max_pools_backward(),
    "aten.maximum.default": one(X, Y),
    "aten.mean.default": one(X),
    "aten.mean.dim": one(X, [0, -1], True),
    "aten.min.default": one(X),
    "aten.min.dim": one(X, 0),
    "aten.minimum.default": one(X, Y),
    "aten.mm.default": one(draw(3, 4), draw(4, 5)),
    "aten.mse_loss.default": over_reductions(),
    "aten.mse_loss_backward.default": backward_over_reductions(),
    "aten.mv.default": one(draw(3, 4), draw(4)),
    "aten.native_batch_norm.default": [batch_norm(False)],
    "aten.native_batch_norm_backward.default": [batch_norm_backward(True), batch_norm_backward(False)],
    "aten.native_layer_norm.default": [call(X, [3, 4], draw(3, 4), draw(3, 4), 1e-5), call(X, [4], None, None, 1e-5)],
    "aten.native_layer_norm_backward.default": layer_norm_backward(),
    "aten.new_full.default": one(X, [2], 1.5),
    "aten.new_ones.default": one(X, [2, 3]),
    "aten.new_zeros.default": one(X, [2, 3]),
    "aten.nll_loss_backward.default": losses_backward(),
    "aten.nll_loss_forward.default": losses(),
    "aten.ones.default": one([2, 3], **F64),
    "aten.ones_like.default": one(X),
    "aten.permute.default": one(X, [2, 0, 1]),
    "aten.pow.Scalar": one(1.5, X),
    "aten.pow.Tensor_Scalar": [call(X, 2), call(POSITIVE, 1.7), call(X, 3)],
    "aten.pow.Tensor_Tensor": one(POSITIVE, Y),
    "aten.prod.default": one(UNIT),
    "aten.repeat.default": one(SQUARE, [2, 1, 3]),
    "aten.reshape.default": one(X, [6, -1]),
    "aten.rsub.Tensor": one(X, Y, alpha=2),
    "aten.rsub.Scalar": one(X, 2, 3),
    "aten.scalar_tensor.default": one(1.5, **F64),
    "aten.scatter.src": one(draw(3, 4), 1, torch.tensor([[0, 3], [1, 2], [2, 0]]), draw(3, 4).flip(0)),
    "aten.scatter.value": one(draw(3, 4), 1, torch.tensor([[0, 3], [1, 1], [2, 0]]), 1.5),
    "aten.scatter_add.default": one(draw(3, 4), 0, torch.tensor([[0, 0, 1, 2]]), draw(3, 4).flip(0)),
    "aten.select.int": one(X, -1, 2),
    "aten.select_backward.default": one(draw(2, 4), [2, 3, 4], 1, 2),
    "aten.sigmoid_backward.default": one(Y, X.sigmoid()),
    "aten.silu_backward.default": one(Y, X),
    "aten.slice.Tensor": [call(X, 2, 1, 3), call(X, 1, 0, 9223372036854775807, 2), call(X, 1, -2)],
    "aten.slice_backward.default": one(draw(2, 3, 2), [2, 3, 4], 2, 0, 4, 2),
    "aten.slice_scatter.default": one(X, draw(2, 3, 2), 2, 1, 3),
    "aten.smooth_l1_loss.default": over_reductions(0.5),
    "aten.smooth_l1_loss_backward.default": backward_over_reductions(0.5),
    "aten.softplus_backward.default": one(Y, X, 2.0, 1.5),
    "aten.split.Tensor": one(X, 3, 2),
    "aten.split_with_sizes.default": one(X, [1, 3], 2),
    "aten.split_with_sizes_copy.default": one(X, [1, 3], 2),
    "aten.squeeze.default": one(draw(1, 3, 1)),
    "aten.squeeze.dim": [call(draw(1, 3, 1), 0), call(draw(1, 3, 1), 1)],
    "aten.squeeze.dims": one(draw(1, 3, 1), [0, 1]),
    "aten.stack.default": one([X, Y], 1),
    "aten.sub.Tensor": [call(X, Y), call(X, Y, alpha=2)],
    "aten.sub.Scalar": one(X, 2, 3),
    "aten.sum.default": [call(X), call(MASK)],
    "aten.sum.dim_IntList": [call(X, [0, 2], True), call(X, [])],
    "aten.t.default": [call(SQUARE), call(draw(3))],
    "aten.tanh_backward.default": one(Y, X.tanh()),
    "aten.threshold_backward.default": one(Y, X, 0.2),
    "aten.transpose.int": one(X, 0, -1),
    "aten.tril.default": one(SQUARE, -1),
    "aten.triu.default": one(SQUARE, 1),
    "aten.unbind.int": one(X, 1),
    "aten.unsqueeze.default": one(X, -1),
    "aten.var.correction": [call(X, [1], correction=0), call(X)],
    "aten.var_mean.correction": one(X, [1, 2], correction=1, keepdim=True),
    "aten.view.default": one(X, [6, -1]),
    "aten.where.Scalar": one(MASK, 1.5, 2.5),
    "aten.where.ScalarOther": one(MASK, X, 1.5),
    "aten.where.ScalarSelf": one(MASK, 1.5, X),
    "aten.where.self": one(MASK, X, Y),
    "aten.zeros.default": one([2, 3], **F64),
    "aten.zeros_like.default": one(X),
}
