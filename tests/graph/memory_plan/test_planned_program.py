"""Programs with a memory plan: the values of programs without, whatever is written over."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, fx, nn

from tests.graph.memory_plan.random_steps import Recipe, inputs, recipes, step_of
from tests.graph.steps import descent, descent_inputs
from weft.errors import GraphError
from weft.graph import Graph, PlannedProgram, Program, Signature, capture, rewrite
from weft.graph.ir.pytree import paths_of
from weft.graph.memory_plan import Arena, storage_plan
from weft.graph.programs.program import refuse

REPLACING = Signature(replaced=("state",))


def check_three_steps(graph: Graph, folder: Path) -> None:
    """A program that writes over its state does what one does that makes a new one; what it returned stays."""
    plain, planned = Program(graph, folder=folder), PlannedProgram(graph, REPLACING, folder=folder)
    state, _ = inputs(0)
    own = [tensor.clone() for tensor in state]
    seen: list[tuple[list[Tensor], list[Tensor]]] = []
    for number in range(3):
        _, batch = inputs(number + 1)
        expected, state, _ = plain(state, batch)
        results, _ = planned.run([*own, *batch], refuse, None)
        found = [results[place] for path, place in paths_of(graph.results) if path.startswith("outputs")]
        seen.append((found, [tensor.clone() for tensor in expected]))
        for pair in zip([*own, *found], [*state, *expected], strict=True):
            assert torch.equal(*pair)
    for found, expected in seen:
        assert all(map(torch.equal, found, expected))


@settings(deadline=None, max_examples=40)
@given(recipes)
def test_a_plan_changes_no_value(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> None:
    graph = capture(step_of(recipe), *inputs(0))
    for variant in (graph, rewrite(graph)):
        check_three_steps(variant, tmp_path_factory.getbasetemp())


def test_a_plan_that_forgets_late_readers_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(state: list[Tensor], batch: list[Tensor]) -> tuple[Any, Any]:
        first = state[0] @ batch[0]
        second = first + 1
        return [second @ (first * 2)], state

    graph = capture(step, *inputs(0))
    check_three_steps(graph, tmp_path)
    reads = storage_plan._Planner._last_reads

    def first_reads(planner: storage_plan._Planner, nodes: Any) -> dict[fx.Node, int]:
        return {node: min(last, planner._numbers[node] + 1) for node, last in reads(planner, nodes).items()}

    monkeypatch.setattr(storage_plan._Planner, "_last_reads", first_reads)
    with pytest.raises(AssertionError):
        check_three_steps(graph, tmp_path)


def test_state_tensors_that_are_swapped_keep_their_values(tmp_path: Path) -> None:
    graph = capture(lambda state, batch: ([state[0]], [state[1], state[0] + 1, state[2].t()]), *inputs(0))
    check_three_steps(graph, tmp_path)


def test_new_state_is_written_over_the_old(tmp_path: Path) -> None:
    program = PlannedProgram(capture(descent, *descent_inputs()), REPLACING, folder=tmp_path)
    state, batch = descent_inputs()
    places = {name: tensor.data_ptr() for name, tensor in state.items()}
    expected = Program(program.graph, folder=tmp_path)({n: t.clone() for n, t in state.items()}, batch)
    outputs, after, _ = program(state, batch)
    assert {name: tensor.data_ptr() for name, tensor in after.items()} == places
    assert all(torch.equal(after[name], expected[1][name]) for name in state)
    assert torch.equal(outputs["loss"], expected[0]["loss"])
    assert ".copy_(" not in program.source  # nothing was made elsewhere first


def test_what_stays_is_looked_at_once(tmp_path: Path) -> None:
    graph = capture(lambda state, batch: (batch @ state.t(), state), torch.ones(2, 3), torch.ones(4, 3))
    program = PlannedProgram(graph, Signature(kept=("state",)), folder=tmp_path)
    once, each = program.source.split("def step")
    assert "torch.t(" in once and "torch.t(" not in each
    other = torch.full((2, 3), 2.0)  # another state is bound anew
    for state in (torch.ones(2, 3), other, other):
        assert program(state, torch.ones(4, 3))[0].tolist() == (torch.ones(4, 3) @ state.t()).tolist()


def test_an_update_comes_right_after_its_gradient(tmp_path: Path) -> None:
    source = PlannedProgram(capture(descent, *descent_inputs()), REPLACING, folder=tmp_path).source
    assert source.count("# update") > 1 and source.count("# backward") > 1


def test_running_statistics_are_written_over(tmp_path: Path) -> None:
    norm = nn.BatchNorm1d(3)
    buffers = dict(norm.named_buffers())

    def step(state: Any, batch: Tensor) -> tuple[Any, Any]:
        return torch.func.functional_call(norm, state, (batch,)), state

    state = {**{name: p.detach() for name, p in norm.named_parameters()}, **buffers}
    program = PlannedProgram(capture(step, state, torch.randn(5, 3)), REPLACING, folder=tmp_path)
    batch = torch.randn(5, 3)
    program(state, batch)
    assert "_native_batch_norm_legit(" in program.source and "functional" not in program.source
    torch.testing.assert_close(buffers["running_mean"], 0.1 * batch.mean(0))
    assert buffers["num_batches_tracked"].item() == 1


def test_a_loss_that_is_not_finite_ends_the_step(tmp_path: Path) -> None:
    signature = Signature(replaced=("state",), guard="loss")
    program = PlannedProgram(capture(descent, *descent_inputs()), signature, folder=tmp_path)
    state, batch = descent_inputs()
    before = {name: tensor.clone() for name, tensor in state.items()}
    outputs, after, _ = program(state, {**batch, "y": torch.full((5, 2), torch.inf)})
    assert not outputs["loss"].isfinite()
    assert all(after[name] is state[name] and torch.equal(after[name], before[name]) for name in state)
    program(state, batch)
    assert not torch.equal(state["w"], before["w"])


def test_memory_that_two_share_is_not_written_over(tmp_path: Path) -> None:
    whole = torch.zeros(6)
    graph = capture(lambda state, batch: (batch, [state[0] + 1, state[1]]), [whole[:3], whole[3:]], torch.ones(3))
    program = PlannedProgram(graph, REPLACING, folder=tmp_path)
    program([whole[:3], whole[3:]], torch.ones(3))
    for state in ([whole[:3], whole[2:5]], [whole[2:5], whole[:3]]):
        with pytest.raises(GraphError, match="shares memory"):
            program(state, torch.ones(3))


def test_programs_share_an_arena(tmp_path: Path) -> None:
    arena = Arena()

    def step(state: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        return (batch @ state).relu().sum(), state

    programs = [
        PlannedProgram(capture(step, torch.ones(4, 4), torch.ones(n, 4)), arena=arena, folder=tmp_path) for n in (8, 64)
    ]
    for n, program in ((8, programs[0]), (64, programs[1]), (8, programs[0])):
        assert program(torch.ones(4, 4), torch.ones(n, 4))[0].item() == n * 16
    assert len(arena.memory) == programs[1].num_bytes > programs[0].num_bytes


def test_names_of_the_state_cannot_hide_names_of_the_code(tmp_path: Path) -> None:
    names = ["sink", "own", "copy", "torch", "inputs", "constants", "memory", "step", "kept", "results", "_", "class"]
    state = {name: torch.ones(2) for name in names}
    graph = capture(lambda state, batch: (batch * 2, {n: t * 2 for n, t in state.items()}), state, torch.ones(2))
    _, new, _ = PlannedProgram(graph, REPLACING, folder=tmp_path)(state, torch.ones(2))
    assert all(tensor.tolist() == [2.0, 2.0] for tensor in new.values())


def test_named_sizes_are_refused(tmp_path: Path) -> None:
    graph = capture(lambda state, batch: (batch * 2, state), (), torch.ones(3), dynamic={"batch": {0: "n"}})
    with pytest.raises(GraphError, match=r"named sizes \(n\)"):
        PlannedProgram(graph, folder=tmp_path)
