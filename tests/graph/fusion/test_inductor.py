"""Regions compiled: the values of the operators inside, memory of their own, and an error for what does not fit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.graph.fusion.test_fuse import always, momentum, momentum_inputs
from weft.errors import GraphError
from weft.graph import Program, capture
from weft.graph.fusion import compile_region, fuse, regions_of
from weft.graph.fusion.inductor import without_aliasing


def test_a_program_with_a_compiled_region_steps_as_one_without() -> None:
    state, batch = momentum_inputs(3)
    graph = capture(momentum, state, batch)
    plain, fused = Program(graph), Program(fuse(graph))
    (region,) = regions_of(fused.graph).values()
    assert f"region_{region.name} = compiled({region.name!r})" in fused.source
    assert "cpp_fused" in compile_region(region).source
    states = [state, state]
    for _ in range(3):
        for i, program in enumerate((plain, fused)):
            _, states[i], _ = program(states[i], batch)
    for part in ("w", "v"):
        for name, weight in states[0][part].items():
            torch.testing.assert_close(states[1][part][name], weight, rtol=1e-5, atol=1e-6)


def test_what_a_compiled_region_gives_is_memory_of_its_own() -> None:
    def step(state: Any, batch: Tensor) -> tuple[Any, Any]:
        copy = batch.clone()
        return [copy, copy * 1, copy.sin(), copy.sin(), (copy + 1).t()], state

    (region,) = regions_of(fuse(capture(step, (), torch.ones(4, 4)), worth=always)).values()
    run = compile_region(region)
    assert run is compile_region(region)
    for _ in range(2):  # the first call finds out what is shared
        given = torch.rand(4, 4)
        outputs = run([given])
        memory = [tensor.untyped_storage().data_ptr() for tensor in (given, *outputs)]
        assert len(set(memory)) == len(memory)
        for found, expected in zip(outputs, region.run([given]), strict=True):
            assert found.stride() == expected.stride()
            torch.testing.assert_close(found, expected)


def test_a_tensor_that_does_not_fit_is_refused() -> None:
    graph = fuse(capture(lambda state, batch: (batch.exp().sin(), state), (), torch.ones(4, 4)), worth=always)
    (region,) = regions_of(graph).values()
    with pytest.raises(AssertionError):
        compile_region(region)([torch.ones(4, 5)])
    with pytest.raises(AssertionError):
        compile_region(region)([torch.ones(4, 4).t()])  # the right shape, and other strides


def test_norms_and_sums_are_compiled_with_what_surrounds_them() -> None:
    def step(state: Any, batch: Tensor) -> tuple[Any, Any]:
        normal = nn.functional.layer_norm(batch * 2, (16,), state, state).relu()
        channels = nn.functional.batch_norm(normal.view(8, 4, 4), state[:4].clone(), state[:4].exp(), training=True)
        return [channels.exp(), torch.log_softmax(normal, 1).sum(0), normal.mean()], state

    (region,) = regions_of(fuse(capture(step, torch.ones(16), torch.ones(8, 16)), worth=always)).values()
    given = [torch.randn(like.shape).abs() for like in region.inputs]
    for found, expected in zip(compile_region(region)(list(given)), region.run(given), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_machine_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("No working C++ compiler found\nand more")

    monkeypatch.setattr("weft.graph.fusion.inductor.compile_with_inductor", fail)
    (region,) = regions_of(fuse(capture(lambda s, b: (b.cos().tan(), s), (), torch.ones(3)), worth=always)).values()
    with pytest.raises(GraphError, match=r"cannot be compiled \(.*: No working C\+\+ compiler found\); install"):
        compile_region(region)


def test_an_output_that_the_compiler_takes_from_an_input_is_copied() -> None:
    made = torch.zeros(3)

    def lazy(given: list[Tensor]) -> list[Tensor]:
        return [given[0], made, made.view(3, 1)]

    run = without_aliasing(lazy)
    for _ in range(2):  # the first call finds out what is shared
        given = torch.ones(3)
        outputs = run([given])
        for output in outputs:
            output.fill_(7)
        assert given[0] == 1 and made[0] == 7
        assert len({output.data_ptr() for output in outputs}) == 3
