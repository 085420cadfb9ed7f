"""Generated code: what it frees, what it hands over, what it refuses; and the programs an executor keeps."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn

from tests.graph.steps import descent, descent_inputs
from weft.errors import GraphError
from weft.graph import AbstractProgram, Graph, GraphExecutor, Program, TapeProgram, capture
from weft.specs import Batch

ALIVE: WeakSet[Tensor] = WeakSet()


@torch.library.custom_op("weft_tests::noted", mutates_args=())
def noted(x: Tensor) -> Tensor:
    ALIVE.add(result := x + 1)
    return result


@torch.library.custom_op("weft_tests::count_alive", mutates_args=())
def count_alive(x: Tensor) -> Tensor:
    return torch.tensor(float(len(ALIVE)))


noted.register_fake(torch.empty_like)
count_alive.register_fake(lambda x: x.new_empty(()))


@pytest.mark.parametrize("kind", [Program, TapeProgram])
def test_values_are_freed_after_their_last_use(kind: Callable[[Graph], AbstractProgram]) -> None:
    def step(state: Any, batch: Tensor) -> tuple[Tensor, Any]:
        for _ in range(5):
            batch = noted(batch)
        return count_alive(batch), state

    assert kind(capture(step, (), torch.ones(2)))((), torch.ones(2))[0].item() <= 2


def test_the_generated_file_can_be_read(tmp_path: Path) -> None:
    program = Program(capture(descent, *descent_inputs()), folder=tmp_path / "code")
    assert program.file.parent == tmp_path / "code"
    assert program.file.read_text() == program.source
    assert "# update" in program.source and "# steps.py:" in program.source


def test_a_folder_that_cannot_be_written_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    program = Program(capture(descent, *descent_inputs()), folder=tmp_path / "file")
    assert not program.file.exists()
    program(*descent_inputs())


def test_what_runs_is_not_what_the_file_became(tmp_path: Path) -> None:
    graph = capture(descent, *descent_inputs())
    Program(graph, folder=tmp_path).file.write_text("raise SystemExit")
    Program(graph, folder=tmp_path)(*descent_inputs())


def test_names_of_the_state_cannot_hide_names_of_the_code() -> None:
    names = ["sink", "own", "copy", "torch", "inputs", "constants", "aten_mul_Tensor", "step", "float", "class"]
    state = {name: torch.ones(2) for name in names}

    def step(state: Any, batch: Tensor) -> tuple[Any, Any]:
        doubled = {name: tensor * torch.tensor(2.0) for name, tensor in state.items()}
        return torch.ops.aten.copy.default(batch, batch * float("inf")), doubled

    outputs, new, _ = Program(capture(step, state, torch.ones(2)))(state, torch.ones(2))
    assert outputs.tolist() == [float("inf")] * 2
    assert {name: tensor.tolist() for name, tensor in new.items()} == {name: [2.0, 2.0] for name in names}


def test_a_result_that_goes_to_two_is_copied_for_one() -> None:
    def step(state: Any, batch: Tensor) -> tuple[Any, Any]:
        doubled = batch * 2
        return {"given": {"a": doubled, "b": doubled, "c": batch}, "kept": doubled}, state

    program = Program(capture(step, (), torch.ones(2)), sunk="given")
    found: dict[str, Tensor] = {}
    batch = torch.ones(2)
    results, _ = program.run([batch], found.__setitem__, None)
    for tensor in found.values():
        tensor.fill_(9)
    assert found.keys() == {"a", "b", "c"}
    assert batch.tolist() == [1.0, 1.0] and [r.tolist() for r in results if r is not None] == [[2.0, 2.0]]


@pytest.mark.parametrize(
    ("state", "batch", "fault"),
    [
        ({"w": torch.ones(2)}, torch.ones(3), "batch: torch.float32"),
        ({"w": torch.ones(2).double()}, torch.ones(2), "state.w: torch.float64"),
        ({"v": torch.ones(2)}, torch.ones(2), "wanted keys: w"),
        ({"w": 3.0}, torch.ones(2), "a tensor is wanted"),
    ],
)
def test_inputs_of_another_form_are_refused(state: Any, batch: Tensor, fault: str) -> None:
    graph = capture(lambda state, batch: (batch * state["w"], state), {"w": torch.ones(2)}, torch.ones(2))
    with pytest.raises(GraphError, match=fault):
        Program(graph)(state, batch)


def test_an_input_that_lies_otherwise_in_memory_is_laid_out_anew() -> None:
    graph = capture(lambda state, batch: (batch.view(6), state), (), torch.ones(2, 3))
    batch = torch.arange(6.0).view(3, 2).t()
    assert torch.equal(Program(graph)((), batch)[0], batch.reshape(6))


def executor(folder: Path) -> GraphExecutor:
    return GraphExecutor(nn.Linear(3, 2), nn.functional.mse_loss, folder=folder)


def draw(num_samples: int) -> Batch:
    return Batch((torch.randn(num_samples, 3),), (torch.randn(num_samples, 2),))


def test_a_shape_is_captured_once_and_the_latest_are_kept(tmp_path: Path) -> None:
    subject = executor(tmp_path)
    state = subject.initial_state()
    first = subject.program(state, draw(4))
    assert subject.program(state, draw(4)) is first
    assert subject.program(state, draw(4), is_training=False) is not first
    for num_samples in range(5, 13):
        subject.program(state, draw(num_samples))
    assert subject.program(state, draw(12)) is subject.program(state, draw(12))
    assert subject.program(state, draw(4)) is not first


def test_a_state_of_another_type_is_captured_anew(tmp_path: Path) -> None:
    subject = executor(tmp_path)
    state = subject.initial_state()
    double = replace(state, parameters={name: p.double() for name, p in state.parameters.items()})
    assert subject.infer(double, draw(4).to(dtype=torch.float64)).loss.dtype == torch.float64
    assert subject.infer(state, draw(4)).loss.dtype == torch.float32
