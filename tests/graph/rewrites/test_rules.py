"""What rules may and may not do: results stay apart, draws stay, repetitions that save memory stay."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from weft.errors import GraphError
from weft.graph import Program, Rule, capture, rewrite
from weft.graph.fusion import fuse
from weft.graph.rewrites import pattern_rule
from weft.graph.rewrites.cleanup import DEAD
from weft.graph.rewrites.pattern import Number, Op, Var, only
from weft.graph.rewrites.pattern import add as plus

aten = torch.ops.aten

Step = Callable[[Any, Any], tuple[Any, Any]]
x, y, z, k = Var("x"), Var("y"), Var("z"), Number("k")
sine = Op((aten.sin.default,))


def targets_after(step: Step, *rules: Rule) -> list[str]:
    graph = capture(step, torch.ones(3, 3), torch.ones(3, 3))
    return [
        operator.target for operator in rewrite(graph, [*rules, DEAD] if rules else None, check_each=True).operators
    ]


def test_calls_with_unlike_numbers_are_not_the_same() -> None:
    found = targets_after(lambda state, batch: (state * 0.0 + state * -0.0 + state * True, state))
    assert found.count("aten.mul.Tensor") == 3


def test_random_draws_are_neither_merged_nor_dropped() -> None:
    def step(state: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        torch.rand(3)
        return torch.rand(3) + torch.rand(3), state

    assert targets_after(step).count("aten.rand") == 3


def test_rewritten_results_share_no_memory() -> None:
    graph = rewrite(
        capture(lambda state, batch: ([batch.sin(), batch.sin(), torch.zeros(3), batch * 1], state), (), torch.ones(3))
    )
    program, given = Program(graph), torch.ones(3)
    first, second, zeros, same = program((), given)[0]
    for tensor in (first, zeros, same):
        tensor.fill_(9)
    assert second[0] != 9 and given[0] != 9 and program((), torch.ones(3))[0][2].tolist() == [0.0] * 3


def test_a_recomputed_forward_is_not_merged_away() -> None:
    from torch.utils.checkpoint import checkpoint

    def step(state: Tensor, batch: Tensor) -> tuple[Any, Any]:
        w = state.detach().requires_grad_()
        with torch.enable_grad():
            loss = checkpoint(lambda x: (x @ w).sin().sin(), batch, use_reentrant=False).sum()
            return [loss.detach(), torch.autograd.grad(loss, w)[0]], state

    assert targets_after(step).count("aten.sin") == 3  # two in forward, the first again in backward


def test_a_rule_that_would_promote_or_broadcast_does_not_fire() -> None:
    def step(state: Tensor, batch: Tensor) -> tuple[Any, Any]:
        counts = torch.arange(3)
        return [(counts * 1.0).sin(), state[0].expand(3, 3).neg().neg().sin(), (counts * 1 + 1).sin()], state

    found = targets_after(step, pattern_rule("times one", x * 1, x))
    assert found.count("aten.mul.Tensor") == 1  # whole numbers times 1.0 become floats


def test_a_pattern_wants_the_defaults_of_what_it_leaves_out() -> None:
    found = targets_after(
        lambda state, batch: (torch.add(state, batch, alpha=2).sin(), state), pattern_rule("r", x + y, x - y)
    )
    assert found == ["aten.add.Tensor", "aten.sin"]


def test_a_name_that_occurs_twice_is_one_variable() -> None:
    rule = pattern_rule("twice", x + x, x * 2)
    found = targets_after(lambda state, batch: ((state + state) + (state + batch), state), rule)
    assert sorted(found) == ["aten.add.Tensor", "aten.add.Tensor", "aten.mul.Tensor"]


def test_only_asks_for_a_single_reader() -> None:
    rule = pattern_rule("fused", x + only(y * z), Op((aten.addcmul.default,))(x, y, z))
    shared = targets_after(lambda s, b: ([(p := s * b) + s, p.sin()], s), rule)
    alone = targets_after(lambda s, b: (s * b + s, s), rule)
    assert "aten.addcmul" not in shared and alone == ["aten.addcmul"]


def test_a_sum_matches_in_both_orders() -> None:
    rule = pattern_rule("no sine", x + sine(y), x + y)
    assert targets_after(lambda s, b: ([s.sin() + b, s + b.sin()], s), rule) == ["aten.add.Tensor", "aten.add.Tensor"]


def test_a_scaled_sum_matches_in_its_own_order_only() -> None:
    # `x + 3 * sin(y)` once matched `sin(y) + 3 * x` too: momentum then scaled the gradient instead of the velocity.
    rule = pattern_rule("no sine", plus(x, sine(y), alpha=k), plus(x, y, alpha=k))
    found = targets_after(lambda s, b: ([torch.add(s, b.sin(), alpha=3), torch.add(b.sin(), s, alpha=3)], s), rule)
    assert found == ["aten.add.Tensor", "aten.sin", "aten.add.Tensor"]


def test_replacement_function_can_refuse_a_match() -> None:
    small = Number("k", lambda number: abs(number) < 2)
    rule = pattern_rule("shrink", x * small, x)
    assert targets_after(lambda s, b: ((s * 1.5 + b * 3).sin(), s), rule).count("aten.mul.Tensor") == 1


def test_rule_is_applied_only_where_it_is_cheaper() -> None:
    there = pattern_rule("spread", (x + y) * z, x * z + y * z, is_cheaper=True)
    back = pattern_rule("gather", x * z + y * z, (x + y) * z, is_cheaper=True)
    step: Step = lambda s, b: ((s * b + b * b).sin(), s)  # noqa: E731
    assert targets_after(step, there, back) == ["aten.add.Tensor", "aten.mul.Tensor", "aten.sin"]


def test_rules_that_undo_each_other_are_found_out() -> None:
    there, back = pattern_rule("there", x - y, x + -y), pattern_rule("back", x + -y, x - y)
    with pytest.raises(AssertionError, match="rules undo each other: there, back"):
        targets_after(lambda s, b: ((s - b).sin(), s), there, back)


def test_a_rule_that_changes_the_graph_wrongly_is_caught_and_named() -> None:
    def forget(nodes: fx.Graph, constants: dict[str, Tensor]) -> int:
        output = nodes.output_node()
        output.args = ((next(iter(nodes.nodes)),) * len(output.args[0]),)  # type: ignore[arg-type]
        return 1

    graph = capture(lambda state, batch: (batch.sum(), state), torch.ones(3), torch.ones(3))
    with pytest.raises(GraphError, match=r"rule breaks the graph \(rule: forget\): .*shape or type of a result"):
        rewrite(graph, [Rule("forget", forget)], check_each=True)


def test_rules_and_reassociate_exclude_each_other() -> None:
    graph = capture(lambda state, batch: (batch.sum(), state), torch.ones(3), torch.ones(3))
    with pytest.raises(GraphError, match="give one of them"):
        rewrite(graph, [DEAD], reassociate=True)


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Tensor], Tensor]]:
    """An operator that counts as talking to other ranks."""
    monkeypatch.setattr("weft.graph.ir.side_effects.COLLECTIVES", ("weft_rules_test.",))
    library = torch.library.Library("weft_rules_test", "FRAGMENT")
    library.define("exchange(Tensor x) -> Tensor")
    library.impl("exchange", torch.clone, "CompositeExplicitAutograd")
    yield torch.ops.weft_rules_test.exchange
    library._destroy()


def test_collectives_are_neither_merged_nor_dropped_nor_fused(exchange: Callable[[Tensor], Tensor]) -> None:
    def step(state: Tensor, batch: Tensor) -> tuple[Any, Any]:
        first, second = exchange(state.sin().cos()), exchange(batch)
        exchange(batch)
        return (first.exp() + second.exp()) * 2, state

    graph = capture(step, torch.ones(3, 3), torch.ones(3, 3))
    fused = fuse(rewrite(graph, reassociate=True, check_each=True), worth=lambda group: True)
    found = [operator.target.partition(".")[0] for operator in fused.operators]
    assert found == ["weft_region", *["weft_rules_test"] * 3, "weft_region"]
