"""An operator in Python with two outputs: rows without their mean, and their scale."""

import torch
from torch import Tensor

from weft.operators import operator


class Normalise:
    """(x - mean) / deviation * gain for each row, and the deviation [rows, 1]."""

    def forward(self, x: Tensor, gain: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
        centred = x - x.mean(-1, keepdim=True)
        deviation = (centred.square().mean(-1, keepdim=True) + eps).sqrt()
        return centred / deviation * gain, deviation

    def backward(
        self, grads: tuple[Tensor, ...], inputs: tuple[Tensor, Tensor, float], outputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, None]:
        (grad, grad_deviation), (x, gain, _), (_, deviation) = grads, inputs, outputs
        unit = (x - x.mean(-1, keepdim=True)) / deviation
        slope = (grad * gain).sum_to_size(x.shape)  # x itself may have been stretched over the gain
        through_mean = slope.mean(-1, keepdim=True) + unit * (slope * unit).mean(-1, keepdim=True)
        grad_x = (slope - through_mean) / deviation + grad_deviation * unit / x.shape[-1]
        return grad_x, (grad * unit).sum_to_size(gain.shape), None

    def reference(self, x: Tensor, gain: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
        variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (x - mean) * torch.rsqrt(variance + eps) * gain, torch.sqrt(variance + eps)

    def samples(self) -> list[tuple[Tensor, Tensor]]:
        return [(torch.randn(4, 6), torch.randn(6)), (torch.randn(2, 3, 5), torch.randn(1, 5))]

    def bench_samples(self) -> list[tuple[Tensor, Tensor]]:
        return [(torch.randn(512, 1024), torch.randn(1024))]


normalise = operator(Normalise, name="examples::normalise")

if __name__ == "__main__":
    rows, deviation = normalise(torch.arange(6.0).reshape(2, 3), torch.ones(3))
    print(rows, deviation)
