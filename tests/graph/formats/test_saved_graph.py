"""Saved graphs: the same step again, elsewhere; and everything that is refused."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.graph.steps import descent, descent_inputs, graph_of
from weft.errors import CorruptFileError, GraphError
from weft.graph import Program, capture, load_graph, rewrite, save_graph, text_of

RUN = """
import sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from weft.graph import Program, load_graph

folder = Path(sys.argv[1])
given = load_file(folder / "given.safetensors")
program = Program(load_graph(folder / "step"), folder=folder)
state, batch = ({k[2:]: v for k, v in given.items() if k[0] == part} for part in "sb")
outputs, state, _ = program(state, batch)
assert not any(name.startswith("tests") for name in sys.modules)
save_file({**state, "loss": outputs["loss"]}, folder / "found.safetensors")
"""


def test_a_saved_step_runs_where_its_source_is_not(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    state, batch = descent_inputs()
    save_graph(rewrite(capture(descent, state, batch)), tmp_path / "step")
    named = [(f"s.{name}", tensor) for name, tensor in state.items()] + [(f"b.{n}", t) for n, t in batch.items()]
    save_file(dict(named), tmp_path / "given.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found, (outputs, new) = load_file(tmp_path / "found.safetensors"), descent(state, batch)
    assert all(torch.equal(found[name], tensor) for name, tensor in {**outputs, **new}.items())


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8, 3)),
        nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)),
    ],
    ids=["convolution", "normalised"],
)
def test_a_saved_graph_is_the_same_graph(module: nn.Module, tmp_path: Path) -> None:
    graph = rewrite(graph_of(module, torch.randn(6, 1, 4, 4), targets=torch.randn(6, 3)))
    save_graph(graph, tmp_path / "step")
    again = load_graph(tmp_path / "step")
    assert text_of(again) == text_of(graph)
    assert Program(again, sunk="gradients").source == Program(graph, sunk="gradients").source


def test_constants_and_odd_numbers_survive(tmp_path: Path) -> None:
    def step(state: Any, batch: torch.Tensor) -> tuple[Any, Any]:
        masked = batch.masked_fill(batch > 1, float("-inf")).clamp(min=-1e30)
        return (masked + torch.tensor([1.5, 2.5])).to(torch.float64), state

    save_graph(capture(step, {"n": 3, "name": None}, torch.ones(2)), tmp_path / "step")
    outputs, state, _ = Program(load_graph(tmp_path / "step"))({"n": 3, "name": None}, torch.tensor([0.0, 2.0]))
    assert outputs.dtype == torch.float64 and outputs[0] == 1.5 and outputs[1] < -1e29
    assert state == {"n": 3, "name": None}


def test_a_folder_that_exists_is_not_written_over(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="folder exists"):
        save_graph(capture(descent, *descent_inputs()), tmp_path)


@torch.library.custom_op("weft_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)


def test_an_operator_from_elsewhere_must_be_named(tmp_path: Path) -> None:
    graph = capture(lambda state, batch: (doubled(batch), state), (), torch.ones(2))
    with pytest.raises(GraphError, match="weft_tests"):
        save_graph(graph, tmp_path / "step")
    also = ["weft_tests.doubled.default"]
    save_graph(graph, tmp_path / "step", also=also)
    with pytest.raises(GraphError, match="not known here"):
        load_graph(tmp_path / "step")
    assert Program(load_graph(tmp_path / "step", also=also))((), torch.ones(2))[0].tolist() == [2.0, 2.0]


def on_document(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        document = json.loads((folder / "graph.json").read_text())
        change(document)
        (folder / "graph.json").write_text(json.dumps(document))

    return plant


def on_call(**changes: Any) -> Callable[[Path], None]:
    def change(document: dict[str, Any]) -> None:
        next(node for node in document["nodes"] if node["kind"] == "call_function").update(changes)

    return on_document(change)


def truncate(folder: Path) -> None:
    text = (folder / "graph.json").read_text()
    (folder / "graph.json").write_text(text[: len(text) // 2])


def spoil_constants(folder: Path) -> None:
    (folder / "constants.safetensors").write_bytes(b"x" * 9)


def drop_last_result(document: dict[str, Any]) -> None:
    document["nodes"][-1]["args"]["tuple"][0]["tuple"].pop()


def as_version_1(document: dict[str, Any]) -> None:
    """Version 1 had no named sizes and no loops."""
    document["version"] = 1
    del document["sizes"], document["conditions"], document["bodies"]


def test_a_graph_of_version_1_is_read(tmp_path: Path) -> None:
    graph = capture(descent, *descent_inputs())
    save_graph(graph, tmp_path / "step")
    on_document(as_version_1)(tmp_path / "step")
    assert text_of(load_graph(tmp_path / "step")) == text_of(graph)


PLANTED: dict[str, tuple[Callable[[Path], None], type[Exception], str]] = {
    "newer version": (on_document(lambda d: d.update(version=3)), GraphError, "another version"),
    "other format": (on_document(lambda d: d.update(format="x")), CorruptFileError, "not a saved graph"),
    "unknown key": (on_document(lambda d: d.update(hook="os.system")), CorruptFileError, "unknown keys"),
    "unknown key of a node": (on_call(hook="os.system"), CorruptFileError, "unknown keys"),
    "truncated": (truncate, CorruptFileError, "cannot be read"),
    "other constants": (spoil_constants, CorruptFileError, "constants"),
    "no constants": (lambda f: (f / "constants.safetensors").unlink(), CorruptFileError, "cannot be read"),
    "operator of files": (on_call(target="aten.from_file.default"), GraphError, "may call"),
    "operator that writes": (on_call(target="aten.relu_.default"), GraphError, "may call|writes in place"),
    "unknown operator": (on_call(target="aten.frobnicate.default"), GraphError, "not known here"),
    "other namespace": (on_call(target="os.system.default"), GraphError, "not known here"),
    "attribute of a class": (on_call(target="aten.mm.__class__"), GraphError, "not known here"),
    "no name of an operator": (on_call(target="aten.mm.default; import os"), GraphError, "not the name"),
    "code for a name": (on_call(name="x = 1; import os"), CorruptFileError, "not the name of a node"),
    "unknown kind": (on_call(kind="call_module"), GraphError, "unknown kind"),
    "unknown value": (on_call(kwargs={"pickle": "x"}), CorruptFileError, "unknown kind"),
    "unknown type": (on_call(kwargs={"dict": {"dtype": {"dtype": "nn"}}}), CorruptFileError, "not known here"),
    "absent node": (on_call(args={"tuple": [{"node": "nobody"}]}), CorruptFileError, "not well formed"),
    "a result less": (on_document(drop_last_result), GraphError, "results and their places differ"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_refused(fault: str, tmp_path: Path) -> None:
    plant, error, text = PLANTED[fault]
    save_graph(capture(descent, *descent_inputs()), tmp_path / "step")
    load_graph(tmp_path / "step")
    plant(tmp_path / "step")
    with pytest.raises(error, match=text):
        load_graph(tmp_path / "step")


def test_a_line_cannot_break_out_of_its_comment(tmp_path: Path) -> None:
    save_graph(capture(descent, *descent_inputs()), tmp_path / "step")
    on_call(line="a.py:1\n    raise SystemExit\r    raise SystemExit")(tmp_path / "step")
    state, batch = descent_inputs()
    Program(load_graph(tmp_path / "step"))(state, batch)
