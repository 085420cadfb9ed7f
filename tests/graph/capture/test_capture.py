"""Capture: what a step becomes, what it is refused for, and that the line at fault is named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.graph.steps import descent, descent_inputs, graph_of, plain
from weft.errors import GraphError
from weft.graph import GraphExecutor, Program, capture, check_shapes, rewrite, training_step
from weft.recipes import digits_mlp
from weft.training.build import build_splits, build_task
from weft.training.gradients import clip_by_norm
from weft.training.loop import take_step
from weft.training.optimizers import OPTIMIZERS, Shared
from weft.training.optimizers.rule_optimizer import Optimizer

ELSEWHERE = torch.ones(2)


def test_forward_backward_and_update_are_one_graph() -> None:
    graph = capture(descent, *descent_inputs())
    roles = [operator.role for operator in graph.operators]
    assert list(dict.fromkeys(roles)) == ["forward", "backward", "update"]
    assert graph.outputs == {"loss": "mean"}
    assert graph.updates.keys() == {"w", "b", "step"}
    check_shapes(graph)


def test_a_captured_step_computes_what_the_step_does() -> None:
    state, batch = descent_inputs()
    program = Program(capture(descent, state, batch))
    for _ in range(3):
        expected = descent(state, batch)
        outputs, state, _ = program(state, batch)
        assert torch.equal(outputs["loss"], expected[0]["loss"])
        assert all(torch.equal(state[name], tensor) for name, tensor in expected[1].items())
    assert int(state["step"]) == 3


def test_running_statistics_are_updated_once() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    x, y = torch.randn(5, 3), torch.randn(5, 2)
    graph = graph_of(module, x, targets=y)
    norms = [operator for operator in graph.operators if "batch_norm" in operator.target and operator.role == "forward"]
    assert [operator.target for operator in norms] == ["aten._native_batch_norm_legit_functional"]
    state = plain(module)
    before = {name: tensor.clone() for name, tensor in state["buffers"].items()}
    _, after, _ = Program(graph)(state, {"inputs": (x,), "targets": (y,)})
    assert all(torch.equal(state["buffers"][name], tensor) for name, tensor in before.items())
    module(x)
    for name, tensor in module.named_buffers():
        assert torch.equal(after["buffers"][name], tensor)


def test_a_tied_weight_is_one_input() -> None:
    weight = torch.randn(3, 3)
    state = {"first": weight, "last": weight}

    def step(state: Any, batch: Tensor) -> tuple[Tensor, Any]:
        new = state["first"] - (batch @ state["first"] @ state["last"]).mean()
        return batch.sum(), {"first": new, "last": new}

    graph = capture(step, state, torch.randn(2, 3))
    assert [variable.path for variable in graph.variables.values() if variable.role == "state"] == ["state.first"]
    with pytest.raises(GraphError, match=r"tied to another.*\.last"):
        Program(graph)({"first": weight, "last": weight.clone()}, torch.randn(2, 3))


def test_tied_weights_that_drift_apart_are_refused() -> None:
    weight = torch.ones(2)
    with pytest.raises(GraphError, match="are one tensor and become two"):
        capture(
            lambda state, batch: (batch, {"a": state["a"] + 1, "b": state["b"] + 2}),
            {"a": weight, "b": weight},
            ELSEWHERE,
        )


def test_dropout_draws_from_the_state_that_is_passed() -> None:
    graph = capture(lambda state, batch: (nn.functional.dropout(batch, 0.5), state), (), torch.ones(64))
    program, random = Program(graph), torch.Generator().manual_seed(3).get_state()
    before = torch.get_rng_state()
    first, _, moved = program((), torch.ones(64), random)
    again, _, _ = program((), torch.ones(64), random)
    other, _, _ = program((), torch.ones(64), moved)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(GraphError, match="pass the state of a generator"):
        program((), torch.ones(64))


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw", "adagrad", "rmsprop"])
def test_several_losses_clipping_and_an_optimizer_of_level_2(name: str) -> None:
    module, optimizer = nn.Linear(3, 2), OPTIMIZERS[name](lr=0.01)
    assert isinstance(optimizer, Optimizer)
    rule = optimizer.rule
    gradients_of = training_step(module, lambda p, y: (p - y).square().mean() + 0.1 * p.abs().mean())

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        outputs, _ = gradients_of(state, batch)
        clipped = clip_by_norm(outputs["gradients"], 0.01)
        shared = rule.new_input(Shared(state["lr"], state["step"]))
        new = {n: rule.update_rule(clipped[n], p, state["slots"][n], shared) for n, p in state["parameters"].items()}  # type: ignore[arg-type]
        parameters, slots = ({n: pair[i] for n, pair in new.items()} for i in (0, 1))
        after = {**state, "parameters": parameters, "slots": slots, "lr": shared.lr, "step": shared.step}
        return {"loss": outputs["loss"]}, after

    state: Any = {**plain(module), "lr": torch.tensor(0.01, dtype=torch.float64)}
    state["step"] = torch.tensor(0.0, dtype=torch.float64)
    state["slots"] = {n: rule.initial_slots(p) for n, p in state["parameters"].items()}
    batch = {"inputs": (torch.randn(4, 3),), "targets": (torch.randn(4, 2),)}
    program, expected = Program(rewrite(capture(step, state, batch))), state
    for _ in range(3):
        _, state, _ = program(state, batch)
        expected = step(expected, batch)[1]
    assert all(torch.equal(state["parameters"][name], tensor) for name, tensor in expected["parameters"].items())


@pytest.mark.parametrize("draw", [lambda x: torch.empty_like(x).bernoulli_(0.5), lambda x: torch.bernoulli(x, 0.5)])
def test_draws_into_permuted_memory_have_the_bits_of_eager(draw: Callable[[Tensor], Tensor]) -> None:
    """In place they fill memory as it lies, else in the order of the dimensions: both are met with in models."""
    x, random = torch.zeros(5, 7, 3).permute(2, 0, 1), torch.Generator().manual_seed(1).get_state()
    found, _, _ = Program(rewrite(capture(lambda state, batch: (draw(batch), state), (), x)))((), x, random)
    torch.set_rng_state(random)
    expected = draw(x)
    assert torch.equal(found, expected) and found.stride() == expected.stride()


def branches(state: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    if batch.sum() > 0:
        return batch, state
    return -batch, state


def bakes(state: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    return batch * ELSEWHERE, state


def selects(state: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    return batch[batch > 0], state


def reads_item(state: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    return batch * batch.sum().item(), state


@pytest.mark.parametrize(
    ("step", "fact", "line"),
    [
        (branches, "decides by the value of a tensor", "if batch.sum() > 0:"),
        (bakes, "in neither its state nor its batch", "return batch * ELSEWHERE, state"),
        (selects, "a shape depends on the values", "return batch[batch > 0], state"),
        (reads_item, "decides by the value of a tensor", "return batch * batch.sum().item(), state"),
    ],
)
def test_what_cannot_be_captured_is_refused_with_its_line(step: Callable[..., Any], fact: str, line: str) -> None:
    with pytest.raises(GraphError) as caught:
        capture(step, torch.ones(2), torch.ones(2))
    assert fact in str(caught.value) and line in str(caught.value)
    first = step.__code__.co_firstlineno
    assert any(f"test_capture.py:{number}:" in str(caught.value) for number in (first + 1, first + 2))


def test_a_module_that_holds_a_tensor_beside_its_buffers_is_refused() -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = [torch.ones(2)]

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale[0]

    with pytest.raises(GraphError, match=r"x \* self.scale\[0\]"):
        graph_of(Holds(), torch.ones(2), targets=torch.ones(2))


def test_a_write_in_place_that_is_returned_is_an_update() -> None:
    def step(state: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        return state * 2, state.add_(batch)

    outputs, state, _ = Program(capture(step, torch.ones(2), torch.ones(2)))(torch.ones(2), torch.ones(2))
    assert outputs.tolist() == [2.0, 2.0] and state.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("write", [lambda state, batch: batch.add_(1), lambda state, batch: state[0].mul_(2)])
def test_a_write_in_place_that_is_lost_is_refused(write: Callable[..., Any]) -> None:
    def step(state: Any, batch: Tensor) -> tuple[Any, Any]:
        old = [state[0].clone()]
        write(state, batch)
        return batch.sum(), old

    with pytest.raises(GraphError, match="writes in place to what it does not return"):
        capture(step, [torch.ones(2)], torch.ones(2))


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        (lambda state, batch: batch, "returns \\(outputs, new state\\)"),
        (lambda state, batch: (batch, None), "state is in the old state only"),
        (lambda state, batch: (batch, state.sum()), "state changes"),
        (lambda state, batch: (batch, state.double()), "state changes"),
        (lambda state, batch: (batch, {"a": object()}), "not a nested dict"),
    ],
)
def test_a_state_of_another_form_is_refused(step: Callable[..., Any], fault: str) -> None:
    with pytest.raises(GraphError, match=fault):
        capture(step, torch.ones(2), torch.ones(2))


def test_a_tensor_made_inside_the_step_is_a_constant() -> None:
    graph = capture(lambda state, batch: (batch * torch.tensor([1.0, 2.0]), state), (), torch.ones(2))
    assert [value.tolist() for value in graph.constants.values()] == [[1.0, 2.0]]
    assert Program(graph)((), torch.ones(2))[0].tolist() == [1.0, 2.0]


def test_a_constant_that_is_returned_belongs_to_the_caller() -> None:
    program = Program(capture(lambda state, batch: (torch.tensor([1.0]), state), (), torch.ones(2)))
    program((), torch.ones(2))[0].fill_(7)
    assert program((), torch.ones(2))[0].tolist() == [1.0]


def test_capturing_leaves_state_and_generator_alone() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    x, y, random = torch.randn(5, 3), torch.randn(5, 2), torch.get_rng_state()
    graph_of(module, x, targets=y)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_a_checkpointed_forward_is_recomputed_in_backward() -> None:
    from torch.utils.checkpoint import checkpoint

    def step(state: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        w = state.detach().requires_grad_()
        with torch.enable_grad():
            loss = checkpoint(lambda x: (x @ w).sin().sin(), batch, use_reentrant=False).sum()
            return torch.autograd.grad(loss, w)[0], state

    graph = capture(step, torch.randn(3, 3), torch.randn(2, 3))
    sines = [operator.role for operator in graph.operators if operator.target == "aten.sin"]
    assert sines.count("backward") >= 1


def test_backward_has_the_lines_of_what_it_is_the_backward_of() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.tanh()
            return y.sigmoid()

    def step(state: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        x = batch.detach().requires_grad_()
        (first,) = torch.autograd.grad(Two()(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0], state

    lines: dict[str, set[str]] = {}
    for operator in capture(step, torch.ones(1), torch.ones(2)).operators:
        lines.setdefault(operator.target, set()).add(operator.line)
    assert lines["aten.tanh_backward"] == lines["aten.tanh"]
    assert lines["aten.sigmoid_backward"] == lines["aten.sigmoid"] != lines["aten.tanh"]
    assert all(line.startswith("test_capture.py:") for found in lines.values() for line in found)


def test_a_model_without_code_of_its_own_has_no_line_in_a_loop_of_wefts() -> None:
    recipe = digits_mlp().with_setting("executor", "tape")
    task, state = build_task(recipe, build_splits(recipe), seed=0)
    take_step(task, state)
    assert isinstance(task.executor, GraphExecutor)
    program = task.executor.program(state.model, task.splits.train.take(torch.arange(32)))
    lines = {operator.target: operator.line for operator in program.graph.operators}
    assert lines["aten.addmm"] == "" and lines["aten._log_softmax"].startswith("losses.py:")
