"""Collectives as operators: recorded, waited for once, never removed, merged or moved."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.errors import GraphError
from weft.graph import (
    Graph,
    Program,
    all_reduce,
    capture,
    check_pass,
    check_shapes,
    load_graph,
    rewrite,
    save_graph,
    start_all_reduce,
    use_collectives,
    wait,
)

aten, weft = torch.ops.aten, torch.ops.weft


class Doubling:
    """Two ranks that always have the same: what a sum over them would be, when it is waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def __call__(self, tensor: Tensor, op: str) -> Callable[[], None]:
        self.log.append(f"start {op}")

        def end() -> None:
            self.log.append("wait")
            tensor.mul_(2 if op == "sum" else 1)

        return end


def step(state: Tensor, batch: Tensor) -> tuple[Any, Tensor]:
    first, second = start_all_reduce(batch), start_all_reduce(batch)  # equal, and yet two calls
    unread = start_all_reduce(batch.square(), "mean")
    total = wait(first) + wait(second)
    wait(unread)
    return total, state + all_reduce(total, "max")


def test_a_promise_is_started_now_and_kept_later() -> None:
    handler = Doubling()
    with use_collectives(handler):
        promise = start_all_reduce(torch.tensor([1.0, 2.0]))
        assert promise.isnan().all() and handler.log == ["start sum"]
        assert torch.equal(wait(promise), torch.tensor([2.0, 4.0]))
        with pytest.raises(GraphError, match="not started, or has been waited for"):
            wait(promise)
    assert handler.log == ["start sum", "wait"]


def test_a_captured_collective_reaches_whoever_stands_for_the_group() -> None:
    graph = capture(step, torch.zeros(2), torch.ones(2))
    check_shapes(graph)
    assert [o.target for o in graph.operators if o.role == "communication"].count("weft.all_reduce") == 4
    handler = Doubling()
    with use_collectives(handler):
        total, after, _ = Program(rewrite(graph))(torch.zeros(2), torch.tensor([1.0, 2.0]))
    assert torch.equal(total, torch.tensor([4.0, 8.0])) and torch.equal(after, total)
    assert handler.log == ["start sum", "start sum", "start mean", "wait", "wait", "wait", "start max", "wait"]
    with pytest.raises(GraphError, match=r"no ranks to talk to \(group: world\)"):
        Program(graph)(torch.zeros(2), torch.ones(2))


def collectives(graph: Graph) -> list[str]:
    return [operator.name for operator in graph.operators if operator.role == "communication"]


def test_rewrites_leave_collectives_as_they_are() -> None:
    graph = capture(step, torch.zeros(2), torch.ones(2))
    assert collectives(rewrite(graph)) == collectives(graph)


def without(graph: Graph, name: str) -> Graph:
    after = graph.edited()
    nodes = {node.name: node for node in after.nodes.nodes}
    nodes[name].replace_all_uses_with(nodes[name].args[0])
    after.nodes.erase_node(nodes[name])
    return after


def swapped(graph: Graph) -> Graph:
    after = graph.edited()
    starts = [node for node in after.nodes.nodes if node.target is weft.all_reduce.default]
    starts[1].prepend(starts[2].args[0])
    starts[1].prepend(starts[2])
    return after


def test_a_pass_that_moves_a_collective_is_caught() -> None:
    graph = capture(step, torch.zeros(2), torch.ones(2))
    with pytest.raises(GraphError, match="talks to other ranks"):
        check_pass(graph, swapped(graph))


def test_a_promise_that_is_read_early_or_never_is_caught() -> None:
    graph = capture(step, torch.zeros(2), torch.ones(2))
    with pytest.raises(GraphError, match=r"is to be waited for once \(readers: aten.add.Tensor\)"):
        check_pass(graph, without(graph, "wait"))


def test_gradients_are_reduced_as_the_values_were() -> None:
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    with use_collectives(Doubling()):
        all_reduce(x * 3).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, torch.full((2,), 6.0))
        with pytest.raises(NotImplementedError, match="no gradient of this reduction"):
            all_reduce(x, "max").sum().backward()


def test_a_saved_graph_keeps_its_collectives(tmp_path: Any) -> None:
    graph = capture(step, torch.zeros(2), torch.ones(2))
    save_graph(graph, tmp_path / "step")
    assert collectives(load_graph(tmp_path / "step")) == collectives(graph)


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(GraphError, match=r"no such reduction \(men\).*mean"):
        start_all_reduce(torch.ones(1), "men")
