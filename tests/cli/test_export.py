"""`weft export` and `weft run --init`: weights leave as plain files, and come back to the same bits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weft as weft_library
from weft.records.record_file import read_record
from weft.runs.export import weights_of_run
from weft.training.build import build_splits, build_task
from weft.training.recipe import Recipe
from weft.training.weights import read_weights


def test_a_run_leaves_as_a_file_or_a_folder(weft: Any, finished_run: Path, tmp_path: Path) -> None:
    expected, _ = weights_of_run(finished_run, 1)
    assert weft("export", finished_run, "--seed", 1, "--out", tmp_path / "m.safetensors").code == 0
    assert weft("export", finished_run, "--seed", 1, "--out", tmp_path / "folder").code == 0
    for path in ("m.safetensors", "folder"):
        found = read_weights(tmp_path / path)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert (config["model_type"], config["weft"]["recipe"], config["weft"]["seed"]) == ("mlp", "digits_mlp", 1)


def test_a_run_begins_with_weights_that_are_given(weft: Any, finished_run: Path, tmp_path: Path) -> None:
    weft("export", finished_run, "--out", tmp_path / "m")
    recipe = Recipe.from_dict(read_record(finished_run).recipe).with_setting("init", str(tmp_path / "m"))
    _, state = build_task(recipe, build_splits(recipe), 7)
    expected, _ = weights_of_run(finished_run)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state.model.parameters.items())
    outcome = weft("run", "digits_mlp", "--init", tmp_path / "nowhere", "--out", tmp_path / "run")
    assert outcome.code == 2 and "there are no weights" in outcome.err and not (tmp_path / "run").exists()


def test_options_that_make_no_sense_are_refused(weft: Any, finished_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "m"
    assert "run has no such seed" in weft("export", finished_run, "--seed", 9, "--out", out).err
    assert "a run has no parts" in weft("export", finished_run, "--part", "model", "--out", out).err
    assert "there is no run and no checkpoint" in weft("export", tmp_path, "--out", out).err
    assert not out.exists()


def test_a_script_s_checkpoint_leaves_too(weft: Any, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    weft_library.save(tmp_path / "checkpoint", net=model, optimizer=torch.optim.SGD(model.parameters()))
    assert weft("export", tmp_path / "checkpoint", "--part", "net", "--out", tmp_path / "m.safetensors").code == 0
    weft_library.export(tmp_path / "direct", model, {"model_type": "mine"})
    for path in ("m.safetensors", "direct"):
        found = weft_library.read_state_dict(tmp_path / path)
        assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    outcome = weft("export", tmp_path / "checkpoint", "--part", "optimizer", "--out", "x")
    assert "part is no state of a model" in outcome.err
    with pytest.raises(weft_library.WeftError, match="path is taken"):
        weft_library.export(tmp_path / "direct", model)
