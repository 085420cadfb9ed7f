"""The catalogue of data sets."""

import importlib.util
import inspect
from pathlib import Path

import pytest
import torch

from weft.errors import RecipeError
from weft.training.component import Component, build, options_of
from weft.training.datasets import DATASETS, locate

AT_HAND = ("digits", "gratings", "heat", "pydoc", "pydoc_topics")


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_a_factory_takes_typed_options_by_name_only(name: str) -> None:
    parameters = inspect.signature(DATASETS[name]).parameters
    options = options_of(DATASETS[name])
    assert list(options) == list(parameters)
    assert all(option.annotation is not inspect.Parameter.empty for option in options.values())
    assert DATASETS[name].__doc__


@pytest.mark.parametrize("name", AT_HAND)
def test_data_at_hand_fits_its_own_description(name: str) -> None:
    splits = build(Component(name), DATASETS, "data")
    assert splits.name == name and len(splits.checksum()) == 64
    for part in (splits.train, splits.validation, splits.test):
        batch = part.take(torch.arange(2))
        assert batch.inputs[0].dtype == splits.task.input.dtype
        if part.lengths() is None:
            assert tuple(batch.inputs[0].shape[1:]) == splits.task.input.shape


def test_digits_are_cut_the_same_way_every_time() -> None:
    first, second = DATASETS["digits"](), DATASETS["digits"]()
    assert first.checksum() == second.checksum()
    assert [len(part) for part in (first.train, first.validation, first.test)] == [1259, 179, 359]
    images = first.train.take(torch.arange(1259)).inputs[0]
    assert images.min() == 0 and images.max() == 1
    for part in (first.train, first.validation, first.test):
        labels = part.labels()
        assert labels is not None and labels.bincount(minlength=10).min() >= 10


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_every_data_set_is_found_or_has_a_cure(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    there = locate(name)
    assert there.name == name and there.where
    assert there.found == (not there.cure)
    if name in AT_HAND:
        assert there.found


def test_images_are_not_there_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert locate("images").cure == "pip install 'weft[images]'"


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(RecipeError, match="did you mean 'digits'"):
        locate("digit")
