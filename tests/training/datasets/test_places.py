"""Where data files are looked for."""

from pathlib import Path

import pytest

from weft.errors import DataNotFoundError
from weft.training.datasets.places import FileSet, cache_folder, find_user_file, find_user_folder

FILES = FileSet("cats", ("a.bin", "b.bin"), "run fetch-cats", folders=("felidae",), suffixes=("", ".gz"))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("WEFT_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def put(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


@pytest.mark.parametrize("place", ["data/cats", "data/felidae", "data", "cache/weft/cats"])
def test_every_place_is_looked_at(home: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setenv("WEFT_DATA", str(home / "data"))
    folder = put(home / place, "a.bin", "b.bin.gz")
    assert dict(FILES.find()) == {"a.bin": folder / "a.bin", "b.bin": folder / "b.bin.gz"}
    assert FILES.availability().where == str(folder)


def test_the_variable_goes_before_the_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(home / "cache/weft/cats", "a.bin", "b.bin")
    assert FILES.find()["a.bin"].parent.parent.name == "weft"
    monkeypatch.setenv("WEFT_DATA", str(put(home / "data", "a.bin", "b.bin")))
    assert FILES.find()["a.bin"].parent == home / "data"


def test_half_a_set_is_passed_over(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DATA", str(put(home / "data", "a.bin")))
    whole = put(home / "cache/weft/cats", "a.bin", "b.bin")
    assert FILES.find()["a.bin"].parent == whole


def test_a_missing_set_names_every_place_and_one_cure(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataNotFoundError) as caught:
        FILES.find()
    assert "WEFT_DATA: not set" in str(caught.value)
    monkeypatch.setenv("WEFT_DATA", str(home / "data"))
    with pytest.raises(DataNotFoundError) as caught:
        FILES.find()
    assert all(str(place) in str(caught.value) for place in FILES.places()) and len(FILES.places()) == 5
    assert str(caught.value).endswith("run fetch-cats")
    assert FILES.availability().cure == "run fetch-cats"


def test_the_cache_is_in_the_home_folder_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "weft"


def test_a_path_of_the_user_must_be_of_the_right_kind(home: Path) -> None:
    put(home, "file.txt")
    assert find_user_file("text", str(home / "file.txt")) == home / "file.txt"
    assert find_user_folder("images", str(home)) == home
    with pytest.raises(DataNotFoundError, match="file"):
        find_user_file("text", str(home))
    with pytest.raises(DataNotFoundError, match="folder"):
        find_user_folder("images", str(home / "file.txt"))
