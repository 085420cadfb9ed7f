"""The profiling tape: the bits of generated code, a time and a cost for every operator."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.operators.rooflines import ROUND
from weft.graph import Graph, GraphExecutor, Profile, Program, TapeProgram, capture, profile_of, training_step
from weft.operators import Cost
from weft.specs import Batch


def small_graph() -> tuple[Graph, dict[str, Tensor], dict[str, Tensor]]:
    def step(state: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        values, places = torch.topk(batch["x"] @ state["w"], 2)
        return {"values": values, "places": places}, {"w": state["w"] + 1}

    state, batch = {"w": torch.randn(4, 3)}, {"x": torch.randn(2, 4)}
    return capture(step, state, batch), state, batch


def ticking() -> Iterator[float]:
    """A clock on which the k-th operator takes k seconds."""
    now = 0.0
    for k in itertools.count(1):
        yield now
        now += k
        yield now


def clocked(graph: Graph, **options: str) -> TapeProgram:
    ticks = ticking()
    return TapeProgram(graph, clock=lambda: next(ticks), **options)


def test_results_are_those_of_generated_code() -> None:
    graph, state, batch = small_graph()
    found, expected = TapeProgram(graph)(state, batch), Program(graph)(state, batch)
    assert torch.equal(found[0]["values"], expected[0]["values"])
    assert torch.equal(found[0]["places"], expected[0]["places"])
    assert torch.equal(found[1]["w"], expected[1]["w"])


def test_every_operator_is_timed_and_every_step_is_kept() -> None:
    graph, state, batch = small_graph()
    tape = clocked(graph)
    for _ in range(2):
        tape(state, batch)
    assert [record.operator.target for record in tape.records] == ["aten.mm", "aten.topk", "aten.add.Tensor"]
    assert [record.seconds for record in tape.records] == [(1.0, 4.0), (2.0, 5.0), (3.0, 6.0)]


def test_costs_are_those_of_the_shapes() -> None:
    graph, state, batch = small_graph()
    tape = TapeProgram(graph)
    assert tape.records[0].cost is None  # nothing has run
    tape(state, batch)
    assert tape.records[0].cost == Cost(2 * 2 * 4 * 3, 4 * (8 + 12), 4 * 6)


def test_what_the_sink_gets_is_not_returned() -> None:
    module = nn.Linear(2, 1)
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    state = {"parameters": parameters, "buffers": {}}
    batch = {"inputs": [torch.ones(3, 2)], "targets": [torch.ones(3, 1)]}
    tape = TapeProgram(capture(training_step(module, nn.functional.mse_loss), state, batch), sunk="gradients")
    got: dict[str, Tensor] = {}
    inputs = [*parameters.values(), *batch["inputs"], *batch["targets"]]
    results, _ = tape.run(inputs, got.__setitem__, None)
    assert got.keys() == {"weight", "bias"}
    assert sum(result is None for result in results) == 2


@pytest.fixture
def profile() -> Profile:
    graph, state, batch = small_graph()
    tape = clocked(graph)
    for _ in range(3):
        tape(state, batch)
    return profile_of(tape.records, ROUND, num_warmup=1)


def test_a_profile_has_medians_and_leaves_out_the_warm_up(profile: Profile) -> None:
    assert [operator.seconds for operator in profile.operators] == [5.5, 6.5, 7.5]
    assert (profile.seconds.count, profile.seconds.median) == (2, 19.5)
    assert [operator.name for operator in profile.longest(2)] == ["add", "topk"]


def test_profile_by_kind_adds_up_to_the_operators(profile: Profile) -> None:
    assert [kind.target for kind in profile.kinds] == ["aten.add.Tensor", "aten.topk", "aten.mm"]
    assert sum(kind.share for kind in profile.kinds) == pytest.approx(1.0)
    assert profile.cost.flops == sum(kind.cost.flops for kind in profile.kinds if kind.cost is not None)


def test_operators_know_their_line_part_and_roof(profile: Profile) -> None:
    product = profile.operators[0]
    assert product.line.startswith("test_tape_program.py:") and product.role == "forward"
    assert product.placement is not None and product.placement.flop_rate == pytest.approx(48 / 5.5)
    assert product.placement.bound == "memory" and product.shape == (2, 3)


def test_kinds_without_a_cost_are_named() -> None:
    graph = capture(lambda state, batch: (torch.linalg.inv(batch), state), (), torch.eye(2))
    tape = TapeProgram(graph)
    tape((), torch.eye(2))
    found = profile_of(tape.records, ROUND)
    assert found.unknown == ("aten.linalg_inv_ex",)
    assert found.kinds[0].placement is None


def test_several_operators_of_a_kind_are_placed_by_their_mean() -> None:
    tape = clocked(capture(lambda state, batch: (batch.tanh().tanh(), state), (), torch.ones(100)))
    tape((), torch.ones(100))
    (kind,) = profile_of(tape.records, ROUND).kinds
    assert (kind.count, kind.seconds, kind.share) == (2, 3.0, 1.0)
    assert kind.cost is not None and kind.cost.flops == 200
    assert kind.placement is not None and kind.placement.memory == "L1"  # 800 bytes a call, 1600 together


def test_the_executor_keeps_a_tape_for_each_shape() -> None:
    module = nn.Linear(2, 1)
    executor = GraphExecutor(module, nn.functional.mse_loss, make_program=lambda g, sunk: TapeProgram(g, sunk=sunk))
    state = executor.initial_state()
    for size in (3, 3, 2):
        batch = Batch((torch.ones(size, 2),), (torch.ones(size, 1),))
        executor(state, batch, lambda *_: None)
    tape = executor.program(state, batch)
    assert isinstance(tape, TapeProgram)
    assert {len(record.seconds) for record in tape.records} == {1}
