"""Folders that transformers writes are read, and it reads those that are written here."""

from pathlib import Path

import pytest
import torch

from weft.training.weights import load_weights, read_weights, write_weights

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()


def test_transformers_reads_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as accelerate does, which from_pretrained imports
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=6)
    model = transformers.GPT2LMHeadModel(config)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # tied
    write_weights(tmp_path / "m", state, config.to_dict(), most_bytes=2000)
    found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "m")
    assert all(torch.equal(tensor, found.state_dict()[name]) for name, tensor in model.state_dict().items())
    model.save_pretrained(tmp_path / "theirs")
    fresh = transformers.GPT2LMHeadModel(config)
    load_weights(fresh, read_weights(tmp_path / "theirs"))
    assert all(torch.equal(tensor, fresh.state_dict()[name]) for name, tensor in model.state_dict().items())
