"""Symbolic sizes: one graph for any batch, with the bits of eager mode; what fixes a size is refused with its line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.graph.steps import plain
from weft.errors import GraphError
from weft.graph import (
    Program,
    capture,
    check_shapes,
    grad,
    load_graph,
    rewrite,
    save_graph,
    svg_of,
    text_of,
    training_step,
)
from weft.graph.capture.dynamic_sizes import Dynamic
from weft.specs import TaskSpec, TensorSpec
from weft.training.models import MODELS

IMAGE = TaskSpec(TensorSpec((1, 8, 8)), 3)
TEXT = TaskSpec(TensorSpec((12,), torch.int64), 5)
BOTH = {"batch": {0: "batch", 1: "length"}}


def maxout(x: Tensor, weight: Tensor, num_pieces: int) -> Tensor:
    """Written with the sizes of its input, as a user would write it."""
    return (x @ weight).view(x.shape[0], -1, num_pieces).amax(2)


def descend(state: Tensor, batch: Any) -> tuple[Any, Tensor]:
    weight = state.detach().requires_grad_()
    with torch.enable_grad():
        loss = (maxout(batch["x"], weight, 2) - batch["y"]).square().sum() / batch["x"].shape[0]
        (gradient,) = torch.autograd.grad(loss, weight)
    return {"loss": loss}, state - 0.1 * gradient


def points(count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return {"x": torch.randn(count, 3, generator=generator), "y": torch.randn(count, 4, generator=generator)}


def maxout_graph(dynamic: Dynamic | None = "batch") -> tuple[Any, Tensor]:
    weight = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    return capture(descend, weight, points(5), dynamic=dynamic), weight


def test_one_graph_serves_every_batch_size() -> None:
    graph, weight = maxout_graph()
    check_shapes(graph)
    program = Program(rewrite(graph))
    for count in (2, 3, 16):
        outputs, after, _ = program(weight, points(count))
        expected = descend(weight, points(count))
        assert torch.equal(outputs["loss"], expected[0]["loss"]) and torch.equal(after, expected[1])


def test_sizes_are_readable() -> None:
    graph, _ = maxout_graph()
    text = text_of(graph)
    assert "float32[batch, 4, 2] aten.view(mm, [batch, -1, 2])" in text
    assert "batch                    at least 2           x.shape[0]" in text
    assert "float32[batch, 4]" in svg_of(graph)
    assert "    batch = x.shape[0]\n" in Program(graph).source


def test_a_saved_graph_keeps_its_sizes(tmp_path: Path) -> None:
    graph, weight = maxout_graph()
    save_graph(graph, tmp_path / "step")
    again = load_graph(tmp_path / "step")
    assert text_of(again) == text_of(graph) and again.conditions == graph.conditions
    outputs, _, _ = Program(again)(weight, points(7))
    assert torch.equal(outputs["loss"], descend(weight, points(7))[0]["loss"])


def test_a_graph_that_is_extended_stays_symbolic() -> None:
    graph = capture(
        lambda state, batch: ({"loss": maxout(batch, state, 2).sum()}, state),
        torch.ones(3, 8),
        torch.ones(4, 3),
        dynamic="batch",
    )
    graph = grad(graph, "outputs.loss", ["state"])
    outputs, _, _ = Program(graph)(torch.ones(3, 8), torch.ones(9, 3))
    assert graph.sizes == {"batch": (1, 0)} and outputs["gradients"]["state"][0, 0] == 4.5


@pytest.mark.parametrize(
    ("name", "make", "dynamic"),
    [
        ("mlp", lambda: MODELS["mlp"](IMAGE, hidden=(4,), dropout=0.2), "batch"),
        ("resnet", lambda: MODELS["resnet"](IMAGE, depth=8, width=2), "batch"),
        ("gpt", lambda: MODELS["char_gpt"](TEXT, width=8, num_heads=2, num_layers=1), BOTH),
    ],
)
def test_a_model_has_the_bits_of_eager_for_every_size(name: str, make: Callable[[], nn.Module], dynamic: Any) -> None:
    module = make()
    step, state = (
        training_step(module, lambda p, t: nn.functional.cross_entropy(p.flatten(0, -2), t.flatten())),
        plain(module),
    )
    random = torch.Generator().manual_seed(5).get_state()
    program = Program(rewrite(capture(step, state, batch_for(name, 5, 7), dynamic=dynamic)))
    for count, length in ((2, 7), (9, 3 if name == "gpt" else 7)):
        outputs, after, _ = program(state, batch_for(name, count, length), random)
        torch.set_rng_state(random)
        buffers = {name: tensor.clone() for name, tensor in state["buffers"].items()}
        expected, new = step({**state, "buffers": buffers}, batch_for(name, count, length))
        assert torch.equal(outputs["loss"], expected["loss"])
        assert all(torch.equal(outputs["gradients"][n], g) for n, g in expected["gradients"].items())
        assert all(torch.equal(after["buffers"][n], b) for n, b in new["buffers"].items())


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def batch_for(name: str, count: int, length: int) -> dict[str, tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(count)
    if name == "gpt":
        tokens = torch.randint(5, (count, length), generator=generator)
        return {"inputs": (tokens,), "targets": (tokens,)}
    images = torch.randn(count, *IMAGE.input.shape, generator=generator)
    return {"inputs": (images,), "targets": (torch.randint(3, (count,), generator=generator),)}


def compares(batch: Tensor) -> Tensor:
    return batch * 2 if batch.shape[0] == 6 else batch


def writes_the_size(batch: Tensor) -> Tensor:
    return batch.view(6, 3)


def meets_another_tensor(batch: Tensor) -> Tensor:
    return batch + torch.ones(6, 3)


def makes_it_a_number(batch: Tensor) -> Tensor:
    scale: float = float(batch.shape[0]) ** 0.5
    return batch * scale


@pytest.mark.parametrize("step", [compares, writes_the_size, meets_another_tensor, makes_it_a_number])
def test_a_step_for_one_size_is_refused_with_its_line(step: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(GraphError, match="needs one size where any was asked for") as caught:
        capture(lambda state, batch: (step(batch), state), (), torch.ones(6, 3), dynamic="batch")
    assert f"test_dynamic_sizes.py:{step.__code__.co_firstlineno + 1}:" in str(caught.value)


def test_a_size_may_become_a_factor() -> None:
    graph = capture(lambda state, batch: (batch * (1 / batch.shape[0]), state), (), torch.ones(4), dynamic="batch")
    assert "aten.mul.Tensor(batch_input, 1 / batch)" in text_of(graph)
    assert torch.equal(Program(graph)((), torch.ones(3))[0], torch.ones(3) * (1 / 3))


def test_two_names_for_what_must_be_one_size_are_refused() -> None:
    dynamic = {"batch.x": {0: "batch"}, "batch.y": {0: "other"}}
    with pytest.raises(GraphError, match="needs one size"):
        capture(descend, torch.ones(3, 8), points(5), dynamic=dynamic)


def test_what_a_step_takes_for_granted_is_stated_and_checked_when_it_runs(tmp_path: Path) -> None:
    def in_pairs(state: Any, batch: Tensor) -> tuple[Tensor, Any]:
        return (batch.view(-1, 2, 3).sum(1) if batch.shape[0] > 3 else batch), state

    graph = capture(in_pairs, (), torch.ones(6, 3), dynamic="batch")
    conditions = [str(condition) for condition in graph.conditions]
    assert "batch > 3" in conditions and "(3*batch) % 6 == 0" in conditions
    save_graph(graph, tmp_path / "step")
    for program in (Program(graph), Program(load_graph(tmp_path / "step"))):
        assert program((), torch.ones(8, 3))[0].shape == (4, 3)
        with pytest.raises(
            GraphError, match=r"other sizes only \(batch: 5; needs: \(3\*batch\) % 6 == 0, .*in_pairs|view"
        ):
            program((), torch.ones(5, 3))
        with pytest.raises(GraphError, match="batch > 3"):
            program((), torch.ones(2, 3))


def test_inputs_of_other_sizes_are_refused_by_path() -> None:
    graph, weight = maxout_graph()
    program = Program(graph)
    with pytest.raises(GraphError, match=r"batch.y: torch.float32 \[5, 4\], wanted: .*\[batch, 4\], batch: 4"):
        program(weight, {"x": torch.ones(4, 3), "y": torch.ones(5, 4)})
    with pytest.raises(GraphError, match=r"at least 2 \(batch: 1\)"):
        program(weight, points(1))
    with pytest.raises(GraphError, match="no dimension 0, batch"):
        program(weight, {"x": torch.tensor(1.0), "y": torch.ones(5, 4)})


@pytest.mark.parametrize(
    ("dynamic", "fault"),
    [
        ({"batch.z": {0: "batch"}}, r"no such place.*did you mean batch.[xy]|no such place"),
        ({"batch.x": {2: "batch"}}, "no tensor has this dimension"),
        ({"batch.x": {0: "Batch size"}}, "small letters"),
        ({"batch.x": {0: "n", 1: "n"}}, "one name for two sizes"),
    ],
)
def test_a_wrong_request_is_refused(dynamic: Dynamic, fault: str) -> None:
    with pytest.raises(GraphError, match=fault):
        maxout_graph(dynamic)


def test_an_example_of_one_is_refused() -> None:
    with pytest.raises(GraphError, match=r"at least 2 \(batch: 1\); capture with a larger example"):
        capture(descend, torch.ones(3, 8), points(1), dynamic="batch")


def test_a_tensor_with_gaps_is_refused_and_a_permuted_one_is_not() -> None:
    def double(state: Any, batch: Tensor) -> tuple[Tensor, Any]:
        return batch * 2, state

    with pytest.raises(GraphError, match="without gaps"):
        capture(double, (), torch.ones(6, 4)[:, ::2], dynamic="batch")
    graph = capture(double, (), torch.ones(3, 6).t(), dynamic="batch")
    assert Program(graph)((), torch.ones(3, 8).t())[0].shape == (8, 3)


def test_an_operator_that_knows_no_symbols_is_refused_with_its_line() -> None:
    lstm = nn.LSTM(3, 4)
    with pytest.raises(GraphError, match=r"cannot be captured for any size .*test_dynamic_sizes.py"):
        capture(
            lambda state, batch: (torch.func.functional_call(lstm, state, (batch,))[0], state),
            dict(lstm.named_parameters()),
            torch.ones(5, 2, 3),
            dynamic="batch",
        )


def test_a_size_may_not_be_called_as_generated_code_calls_something() -> None:
    graph, _ = maxout_graph("sink")
    with pytest.raises(GraphError, match=r"name that generated code needs \(sink\)"):
        Program(graph)
