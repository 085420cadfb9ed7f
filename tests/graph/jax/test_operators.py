"""Every operator of the JAX table against ATen, in float64."""

from functools import cache
from typing import Any

import jax
import pytest
import torch
from torch import Tensor

from tests.graph.jax.samples import SAMPLES, Sample
from weft.graph.jax import OPERATORS
from weft.graph.jax.conversion import to_jax, to_torch

UNDEFINED = {  # what lies in memory that nobody has written to is no result
    "aten.empty.memory_format",
    "aten.empty_like.default",
    "aten.empty_strided.default",
    "aten.new_empty.default",
    "aten.new_empty_strided.default",
}
ELSEWHERE = {"aten.mkldnn_rnn_layer.default", "aten.mkldnn_rnn_layer_backward.default"}  # see test_jax_program.py
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def test_every_operator_has_a_sample() -> None:
    assert OPERATORS.keys() - UNDEFINED - ELSEWHERE == SAMPLES.keys()


def aten_of(name: str) -> Any:
    _, packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def change(value: Any, of: type, by: Any) -> Any:
    """The nested value with every item of a type changed."""
    if isinstance(value, of):
        return by(value)
    if isinstance(value, dict):
        return {key: change(item, of, by) for key, item in value.items()}
    return type(value)(change(item, of, by) for item in value) if type(value) in (list, tuple) else value


class Place(int):
    """Where a tensor stands in a list."""


@cache
def results() -> dict[str, list[Any]]:
    """Every sample computed by JAX in one compilation; one for each operator would take a minute."""
    tensors: list[Tensor] = []

    def placed(tensor: Tensor) -> Place:
        tensors.append(tensor)
        return Place(len(tensors) - 1)

    flat = change(SAMPLES, Tensor, placed)

    def compute(arrays: list[Any]) -> dict[str, list[Any]]:
        return {name: [call(name, change(s, Place, arrays.__getitem__)) for s in ss] for name, ss in flat.items()}

    with jax.enable_x64(True):
        found: dict[str, list[Any]] = jax.jit(compute, compiler_options=FAST)([to_jax(t) for t in tensors])
    return found


def call(name: str, sample: Sample) -> Any:
    args, kwargs = sample
    return OPERATORS[name](*args, **kwargs)


def compare(found: Any, expected: Any) -> None:
    if isinstance(expected, (tuple, list)):
        for one, other in zip(found, expected, strict=True):
            compare(one, other)
    elif expected is not None:
        # The program casts to torch's type: JAX promotes by other rules.
        torch.testing.assert_close(to_torch(found).to(expected.dtype), expected.contiguous(), rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_operators_give_what_aten_gives(name: str) -> None:
    for (args, kwargs), found in zip(SAMPLES[name], results()[name], strict=True):
        compare(found, aten_of(name)(*args, **kwargs))


def test_a_wrong_operator_is_found() -> None:
    with pytest.raises(AssertionError):
        compare(results()["aten.sin.default"][0], SAMPLES["aten.sin.default"][0][0][0].tanh())
