"""Swish in C++: `weft op check examples/operators/swish.py` checks it, `weft op bench` places it on the roofline."""

from pathlib import Path

import torch
from torch import Tensor

from weft.operators import Cost, cpp_operator, tensor_bytes


def swish(x: Tensor, beta: float = 1.0) -> Tensor:
    """What the operator takes and gives; the values come from C++."""
    return torch.empty_like(x)


def swish_cost(x: Tensor, beta: float = 1.0) -> Cost:
    return Cost(flops=4 * x.numel(), bytes_read=tensor_bytes(x), bytes_written=tensor_bytes(x))


fast_swish = cpp_operator(
    Path(__file__).with_name("swish.cpp"),
    swish,
    name="examples::swish",
    samples=lambda: [(torch.randn(4, 5), 1.5), (torch.randn(3, dtype=torch.float64), 1.0)],
    bench_samples=lambda: [(torch.randn(2**12), 1.0), (torch.randn(2**22), 1.0)],
    reference=lambda x, beta: x * torch.sigmoid(beta * x),
    cost=swish_cost,
)

if __name__ == "__main__":
    x = torch.linspace(-2, 2, 5, requires_grad=True)
    fast_swish(x, 2.0).sum().backward()
    print(x.grad)
