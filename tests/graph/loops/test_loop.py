"""The loop operator: values and gradients of the loop written out, eager, captured, symbolic and saved."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.errors import CorruptFileError, GraphError
from weft.graph import Program, capture, check_shapes, extend, grad, load_graph, loop, rewrite, save_graph, text_of
from weft.graph.formats import loop_bodies
from weft.graph.loops.body import flatten_each, record_body
from weft.graph.loops.checkpoint_schedule import first_checkpoints
from weft.graph.loops.gradient import backward_program, forward_program
from weft.graph.loops.running import LoopCall, run_backward, run_forward
from weft.metrics.memory import use_tensor_memory_peak


def unrolled(body: Callable[..., Any], carried: Any, inputs: Tensor) -> tuple[Any, Tensor]:
    outputs = []
    for i in range(inputs.shape[0]):
        carried, output = body(torch.tensor(i), carried, inputs[i])
        outputs.append(output)
    return carried, torch.stack(outputs)


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(n, 4, generator=generator) / 2 for name, n in (("W", 4), ("U", 3))}


def sequence(length: int, batch: int = 2) -> Tensor:
    return torch.randn(length, batch, 3, generator=torch.Generator().manual_seed(length))


def rnn(state: Any, x: Tensor, run: Callable[..., Any], **settings: Any) -> tuple[Tensor, Tensor]:
    def body(_counter: Tensor, h: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ state["W"] + now @ state["U"])
        return h, h.sin()

    return run(body, x.new_zeros(x.shape[1], 4), x, **settings)  # type: ignore[no-any-return]


def descend(run: Callable[..., Any], **settings: Any) -> Callable[[Any, Tensor], tuple[Any, Any]]:
    def step(state: Any, batch: Tensor) -> tuple[Any, Any]:
        given = {name: tensor.detach().requires_grad_() for name, tensor in state.items()}
        with torch.enable_grad():
            last, outputs = rnn(given, batch, run, **settings)
            loss = last.square().sum() + outputs.sum()
            gradients = torch.autograd.grad(loss, list(given.values()))
        return {"loss": loss}, {n: state[n] - 0.1 * g for n, g in zip(state, gradients, strict=True)}

    return step


@pytest.mark.parametrize("checkpoints", [0, 1, 3, 8, None])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_values_and_gradients_are_those_of_the_loop_written_out(length: int, checkpoints: int | None) -> None:
    x, state = sequence(length).requires_grad_(), {n: t.requires_grad_() for n, t in weights().items()}
    found, expected = (rnn(state, x, *run) for run in ((lambda *a: loop(*a, checkpoints=checkpoints),), (unrolled,)))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    wanted = [x, *state.values()]
    gradients = [
        torch.autograd.grad(last.square().sum() + outputs.sum(), wanted) for last, outputs in (found, expected)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_captured_loop_is_one_operator_forward_and_one_backward() -> None:
    graph = capture(descend(loop), weights(), sequence(9))
    targets = [operator.target for operator in graph.operators]
    assert targets.count("weft.loop_kept") == targets.count("weft.loop_backward") == 1
    assert {o.role for o in graph.operators if o.target == "weft.loop_backward"} == {"backward"}
    check_shapes(graph)
    outputs, after, _ = Program(rewrite(graph))(weights(), sequence(9))
    expected = descend(unrolled)(weights(), sequence(9))
    assert torch.equal(outputs["loss"], expected[0]["loss"])
    assert all(torch.equal(after[name], tensor) for name, tensor in expected[1].items())


def test_the_number_of_iterations_may_be_a_size_of_the_batch() -> None:
    graph = capture(descend(loop), weights(), sequence(5), dynamic={"batch": {0: "length", 1: "batch"}})
    assert "weft.loop_kept('" in text_of(graph) and "', length, [w, u]" in text_of(graph)
    program = Program(rewrite(graph))
    for length, batch in ((2, 2), (12, 3), (30, 5)):
        outputs, after, _ = program(weights(), sequence(length, batch))
        expected = descend(unrolled)(weights(), sequence(length, batch))
        assert torch.equal(outputs["loss"], expected[0]["loss"])
        assert all(torch.equal(after[name], tensor) for name, tensor in expected[1].items())


def test_newtons_inverse() -> None:
    a = (torch.eye(4) + torch.randn(4, 4, generator=torch.Generator().manual_seed(1)) / 5).requires_grad_()
    begin = a.t() / (torch.linalg.matrix_norm(a, 1) * torch.linalg.matrix_norm(a, torch.inf))
    found, _ = loop(lambda i, x, _: (x @ (2 * torch.eye(4) - a @ x), ()), begin, num_iterations=20, checkpoints=2)
    (gradient,) = torch.autograd.grad(found.sum(), a)
    inverse = torch.linalg.inv(a)
    assert torch.allclose(found, inverse, atol=1e-5)
    assert torch.allclose(gradient, -(inverse.t() @ torch.ones(4, 4) @ inverse.t()), atol=1e-4)


def test_memory_is_that_of_the_checkpoints_not_of_the_iterations() -> None:
    peaks = {}
    for count in (40, 160):
        carried = [torch.ones(1000)]
        state_bytes, key = 4000, record_body(scaled, carried, *TREES)[0]
        with use_tensor_memory_peak() as peak:
            kept = [torch.empty(3, 1000)]
            to_keep = first_checkpoints(count, 3)
            call = LoopCall(key, count, [], carried, [], checkpoints=3)
            run_forward(call, to_keep, kept)
            states = {step: [kept[0][place]] for place, step in enumerate(to_keep)}
            run_backward(call, states, [torch.ones(1000)])
        peaks[count] = peak.num_bytes // state_bytes
    assert peaks[40] == peaks[160] <= 2 * 3 + 8


def scaled(_counter: Tensor, x: Tensor, _inputs: Any) -> tuple[Tensor, Any]:
    return (x * 0.99).sin(), ()


OUTSIDE = torch.zeros(2)
TREES: tuple[Any, ...] = (flatten_each(torch.ones(1))[1], [], flatten_each(())[1])


def test_loops_inside_loops_have_gradients() -> None:
    w = torch.tensor(0.9, requires_grad=True)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))

    def inner(_i: Tensor, total: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        return total * w + part, total

    def outer(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda _i, total, row: run(inner, total, row)

    values = [run(outer(run), torch.tensor(1.0), x) for run in (loop, unrolled)]
    assert torch.equal(values[0][0], values[1][0]) and torch.equal(values[0][1], values[1][1])
    gradients = [torch.autograd.grad(last + outputs.sum(), w)[0] for last, outputs in values]
    assert torch.allclose(gradients[0], gradients[1])


def test_counter_integers_and_nested_values_are_carried() -> None:
    def body(counter: Tensor, carried: Any, inputs: Any) -> tuple[Any, Any]:
        total = carried["total"] + counter * inputs[0]
        return {"total": total, "pair": carried["pair"][::-1]}, {"seen": total, "nothing": None}

    one, two = torch.tensor(1), torch.tensor(2)
    carried, outputs = loop(body, {"total": torch.tensor(0), "pair": (one, two)}, [torch.tensor([5, 6, 7])])
    assert carried == {"total": torch.tensor(20), "pair": (two, one)}
    assert torch.equal(outputs["seen"], torch.tensor([0, 6, 20])) and outputs["nothing"] is None


def test_no_iterations_give_back_what_is_carried_in_memory_of_its_own() -> None:
    x = torch.ones(3, requires_grad=True)
    last, outputs = loop(lambda i, x, _: (x * 2, x), x, num_iterations=0)
    assert torch.equal(last, x) and outputs.shape == (0, 3)
    assert torch.equal(torch.autograd.grad(last.sum(), x)[0], torch.ones(3))
    last.detach().add_(1)
    assert torch.equal(x, torch.ones(3))


def test_results_never_share_memory() -> None:
    first, second = loop(lambda i, c, _: ((c[0], c[0]), ()), (torch.ones(2), torch.zeros(2)), num_iterations=1)[0]
    first.add_(1)
    assert torch.equal(second, torch.ones(2))


def test_a_module_inside_a_body_is_trained_by_its_own_parameters() -> None:
    cell = nn.GRUCell(3, 4)
    last, _ = loop(lambda i, h, x: (cell(x, h), ()), torch.zeros(2, 4), sequence(5))
    last.sum().backward()
    expected = [parameter.grad for parameter in cell.parameters()]
    cell.zero_grad()
    h = torch.zeros(2, 4)
    for now in sequence(5):
        h = cell(now, h)
    h.sum().backward()
    for parameter, gradient in zip(cell.parameters(), expected, strict=True):
        assert gradient is not None and parameter.grad is not None
        torch.testing.assert_close(gradient, parameter.grad)


def test_operators_pass_the_checks_of_torch() -> None:
    x = sequence(4).requires_grad_()
    w = torch.randn(3, 3, requires_grad=True)
    key, captured, _ = record_body(
        lambda i, h, now: (torch.tanh(h @ w + now), h), [torch.zeros(2, 3)], TREES[0], [x], flatten_each(x)[1]
    )
    arguments = key, 4, captured, [torch.zeros(2, 3)], [x], 2
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.weft.loop.default, arguments, test_utils=tests)


def test_a_graph_without_gradients_gets_them_by_extension_and_no_second_ones() -> None:
    graph = capture(lambda state, batch: ({"loss": rnn(state, batch, loop)[1].sum()}, state), weights(), sequence(9))
    assert [o.target for o in graph.operators if "loop" in o.target] == ["weft.loop"]
    graph = grad(graph, "outputs.loss", ["state.W"])
    outputs, _, _ = Program(graph)(weights(), sequence(9))
    state = {n: t.requires_grad_() for n, t in weights().items()}
    (expected,) = torch.autograd.grad(rnn(state, sequence(9), unrolled)[1].sum(), state["W"])
    assert torch.equal(outputs["gradients"]["state.W"], expected)
    graph = extend(graph, lambda values: {"norm": values["outputs.gradients.state.W"].square().sum()})
    with pytest.raises(GraphError, match="a loop has no second derivative"):
        grad(graph, "outputs.norm", ["state.W"])


def forget_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process, which has never seen a body."""
    monkeypatch.setattr(loop_bodies, "_BODIES", {})
    forward_program.cache_clear()
    backward_program.cache_clear()


def test_a_saved_loop_runs_in_a_process_that_never_saw_its_body(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = capture(descend(loop), weights(), sequence(5), dynamic={"batch": {0: "length"}})
    text = text_of(graph)
    save_graph(graph, tmp_path / "step")
    forget_bodies(monkeypatch)
    with pytest.raises(GraphError, match="not known in this process"):
        Program(graph)(weights(), sequence(8))
    again = load_graph(tmp_path / "step")
    assert text_of(again) == text
    found = Program(again)(weights(), sequence(8))[1]
    assert all(torch.equal(found[n], t) for n, t in descend(unrolled)(weights(), sequence(8))[1].items())


def test_a_saved_body_that_was_changed_is_refused(tmp_path: Path) -> None:
    save_graph(capture(descend(loop), weights(), sequence(5)), tmp_path / "step")
    file = tmp_path / "step" / "graph.json"
    text = file.read_text()
    file.write_text(text.replace("aten.tanh.default", "aten.sinh.default"))
    with pytest.raises(CorruptFileError, match="not the one that is meant"):
        load_graph(tmp_path / "step")


@pytest.mark.parametrize(
    ("body", "settings", "fault"),
    [
        (lambda i, x, _: x, {"num_iterations": 2}, "returns .carried, outputs."),
        (lambda i, x, _: ((x, x), ()), {"num_iterations": 2}, "in the same form"),
        (lambda i, x, _: (x[:1], ()), {"num_iterations": 2}, "changes"),
        (lambda i, x, _: (x.double(), ()), {"num_iterations": 2}, "changes"),
        (lambda i, x, _: (nn.functional.dropout(x), ()), {"num_iterations": 2}, "draws random numbers"),
        (lambda i, x, _: (x if x.sum() > 0 else -x, ()), {"num_iterations": 2}, "decides by the value"),
        (
            lambda i, x, _: (x + OUTSIDE.add_(1), ()),
            {"num_iterations": 2},
            "writes in place to what it does not return",
        ),
        (lambda i, x, _: (x, ()), {}, "number of iterations is not known"),
        (lambda i, x, _: (x, ()), {"num_iterations": -1}, "0 iterations or more"),
        (lambda i, x, _: (x, ()), {"num_iterations": 2, "checkpoints": -1}, "0 states or more"),
        (lambda i, x, _: (x, ()), {"num_iterations": 2, "inputs": torch.ones(3)}, "differ .found: 3, 2."),
        (lambda i, x, _: (x, ()), {"inputs": torch.tensor(1.0)}, "dimension for the iterations"),
    ],
)
def test_what_is_no_loop_is_refused(body: Callable[..., Any], settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(GraphError, match=fault):
        loop(body, torch.ones(2), **settings)
