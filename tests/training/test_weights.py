"""Weights in plain files: safetensors alone, whole models, as Hugging Face lays them out."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from weft.errors import CorruptFileError, UsageError
from weft.training.weights import load_weights, read_weights, write_weights

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor(7)}


def same(found: dict[str, torch.Tensor]) -> bool:
    return found.keys() == TENSORS.keys() and all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


def test_a_file_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "new" / "model.safetensors"
    assert write_weights(file, TENSORS) == [file]
    assert same(read_weights(file)) and same(load_file(file))
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(("most_bytes", "num_files"), [(10**6, 1), (24, 2), (1, 3)])
def test_a_folder_comes_back_in_as_many_files_as_it_takes(tmp_path: Path, most_bytes: int, num_files: int) -> None:
    written = write_weights(tmp_path / "m", TENSORS, {"model_type": "mlp"}, most_bytes=most_bytes)
    assert same(read_weights(tmp_path / "m"))
    assert len([file for file in written if file.suffix == ".safetensors"]) == num_files
    assert json.loads((tmp_path / "m" / "config.json").read_text()) == {"model_type": "mlp"}
    assert (tmp_path / "m" / "model.safetensors.index.json").exists() == (num_files > 1)


def test_what_is_pickled_is_not_read(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "model.pt")
    with pytest.raises(UsageError, match=r"nothing is unpickled .*model.pt\); write it once with safetensors"):
        read_weights(tmp_path / "model.pt")
    with pytest.raises(UsageError, match="there are no weights"):
        read_weights(tmp_path)


def test_a_path_that_is_taken_stays(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"path is taken .*; choose another --out"):
        write_weights(tmp_path, TENSORS)


def test_damage_is_named(tmp_path: Path) -> None:
    write_weights(tmp_path / "m", TENSORS, most_bytes=1)
    second = tmp_path / "m" / "model-00002-of-00003.safetensors"
    save_file({"x": torch.ones(1)}, second)
    with pytest.raises(CorruptFileError, match=r"lacks a tensor that its index names .*00002-of-00003.*: b\)"):
        read_weights(tmp_path / "m")
    second.write_bytes(b"short")
    with pytest.raises(CorruptFileError, match=r"weights cannot be read .*00002-of-00003"):
        read_weights(tmp_path / "m")
    index = tmp_path / "m" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(CorruptFileError, match="a file is not in the folder"):
        read_weights(tmp_path / "m")


def test_weights_of_another_model_are_refused_and_nothing_is_written() -> None:
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    good = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
    with pytest.raises(UsageError, match=r"model has no such tensor \(weights: wight\); .*weight"):
        load_weights(model, {**good, "wight": torch.ones(1)})
    with pytest.raises(UsageError, match=r"weights lack a tensor of the model \(weights: bias\)"):
        load_weights(model, {"weight": good["weight"]})
    with pytest.raises(UsageError, match=r"another shape than the model's \(weights: bias, weights: \(2,\)"):
        load_weights(model, {**good, "bias": torch.ones(2)})
    assert torch.equal(model.weight, before)
    load_weights(model, good)
    assert model.weight.tolist() == [[1.0, 1.0]]
