"""What the tests of tensor parallelism share: a model on virtual ranks against the same model on one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.distributed.group import AbstractGroup
from weft.distributed.placement.rules import NO_RULES, Rules
from weft.distributed.placement.tensor import TensorParallel
from weft.distributed.virtual import run_virtual
from weft.specs.tensors import TaskSpec, TensorSpec
from weft.training.placement import WholeModel

__all__ = ["IMAGES", "TOKENS", "Found", "check_alike", "error_of", "images", "run_on_one", "run_on_parts", "tokens"]

IMAGES = TaskSpec(TensorSpec((3, 8, 8), torch.float32), 10)
TOKENS = TaskSpec(TensorSpec((12,), torch.int64), 37)

Make = Callable[[], nn.Module]
LossOf = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Found:
    """A forward and a backward: the loss, whole gradients and buffers, the generator afterwards, and what is split."""

    loss: float
    tensors: Mapping[str, Tensor]
    random: Tensor
    cuts: tuple[str, ...] = ()


def images() -> Tensor:
    return torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def tokens() -> Tensor:
    return torch.randint(37, (3, 12), generator=torch.Generator().manual_seed(1))


def run_on_one(make: Make, x: Tensor, loss_of: LossOf, dtype: torch.dtype) -> Found:
    return _run(_build(make, dtype), _as(x, dtype), loss_of)


def run_on_parts(
    make: Make, x: Tensor, loss_of: LossOf, dtype: torch.dtype, num_parts: int, rules: Rules = NO_RULES
) -> list[Found]:
    """What each rank found, put together from the parts of all."""

    def program(group: AbstractGroup) -> Found:
        placement = TensorParallel(group, group, WholeModel(), rules=rules)
        found = _run(placement.place(_build(make, dtype)), _as(x, dtype), loss_of)
        for name, tensor in found.tensors.items():
            if "tensor" in placement.reduced_over(name.removeprefix("parameter/")):
                group.all_reduce(tensor)
        whole = placement.whole(found.tensors)
        return Found(found.loss, whole, found.random, tuple(placement.cuts))

    return list(run_virtual(program, num_parts).results)


def check_alike(
    make: Make,
    x: Tensor,
    loss_of: LossOf,
    *,
    num_parts: int = 2,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-10,
    rules: Rules = NO_RULES,
) -> tuple[str, ...]:
    """Assert that parts give what the whole gives, and that random numbers were drawn alike; what was split."""
    expected = run_on_one(make, x, loss_of, dtype)
    ranks = run_on_parts(make, x, loss_of, dtype, num_parts, rules)
    for found in ranks:
        assert error_of(found, expected) < tolerance
        assert torch.equal(found.random, expected.random)
    return ranks[0].cuts


def error_of(found: Found, expected: Found) -> float:
    """The largest error, as a share of the largest value of all gradients or buffers."""
    assert found.tensors.keys() == expected.tensors.keys()
    largest = max(tensor.abs().max().item() for tensor in expected.tensors.values())
    errors = [(found.tensors[name] - tensor).abs().max().item() for name, tensor in expected.tensors.items()]
    return max(max(errors) / largest, abs(found.loss - expected.loss) / max(1.0, abs(expected.loss)))


def _build(make: Make, dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().to(dtype).train()


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def _run(model: nn.Module, x: Tensor, loss_of: LossOf) -> Found:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        loss = loss_of(model(x))
        random = torch.get_rng_state()
    loss.backward()
    tensors = {f"parameter/{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    tensors |= {f"buffer/{n}": buffer.detach() for n, buffer in model.named_buffers() if buffer.is_floating_point()}
    return Found(loss.item(), tensors, random)
