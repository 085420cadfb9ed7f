"""Checkpoints on disk: whole, or known not to be."""

import json
import math
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weft.errors import CorruptFileError, StorageError
from weft.specs import Mesh
from weft.training.checkpoint import (
    Entry,
    Ranks,
    Snapshot,
    latest_checkpoint,
    read_checkpoint,
    write_checkpoint,
    writing,
)
from weft.training.checkpoint import index as index_module

GOLDEN = Path(__file__).parents[2] / "golden"
FILE = "rank-00000.safetensors"

TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


def snapshot_of(step: int = 1, **tensors: Tensor) -> Snapshot:
    return Snapshot(step, {name: Entry(tensor) for name, tensor in tensors.items()}, {"samples": 7})


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refuse_damage(text: str) -> None:
    raise AssertionError(f"whole checkpoint was called damaged: {text}")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3)], ids=str)
def test_every_type_and_shape_comes_back(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 3).to(dtype)
    found = read_checkpoint(write_checkpoint(tmp_path, snapshot_of(x=tensor))).entries["x"].tensor
    assert found.dtype == dtype and found.shape == shape and torch.equal(found, tensor)


def test_tensors_that_are_views_of_each_other_or_not_in_order(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    tensors = {
        "whole": whole,
        "again": whole,
        "turned": whole.t(),
        "part": whole[:, ::2],
        "wide": whole[:1].expand(5, 4),
    }
    tensors["leaf"] = torch.nn.Parameter(torch.ones(2))
    found = read_checkpoint(write_checkpoint(tmp_path, snapshot_of(1, **tensors)))
    assert all(torch.equal(found.entries[name].tensor, tensor) for name, tensor in tensors.items())


def test_progress_comes_back(tmp_path: Path) -> None:
    progress = {"samples": 3, "losses": [0.5, math.inf], "best": math.nan, "text": "inf"}
    found = read_checkpoint(write_checkpoint(tmp_path, Snapshot(4, {}, progress)))
    assert found.step == 4 and math.isnan(found.progress.pop("best"))
    assert found.progress == {key: value for key, value in progress.items() if key != "best"}


def test_nothing_at_all_is_a_checkpoint_too(tmp_path: Path) -> None:
    assert read_checkpoint(write_checkpoint(tmp_path, Snapshot(0, {}))).entries == {}


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    for step in (9, 10, 11, 100):
        write_checkpoint(tmp_path, snapshot_of(step, x=torch.tensor(step)))
    assert names_in(tmp_path) == ["step-0000000011", "step-0000000100"]
    newest = latest_checkpoint(tmp_path, refuse_damage)
    assert newest is not None and newest.step == 100


def test_a_run_that_went_back_drops_what_it_went_back_behind(tmp_path: Path) -> None:
    for step in (10, 20):
        path = write_checkpoint(tmp_path, snapshot_of(step, x=torch.tensor(step)))
    cut_off(path / FILE)
    write_checkpoint(tmp_path, snapshot_of(15, x=torch.tensor(15)))
    assert names_in(tmp_path) == ["step-0000000010", "step-0000000015"]


def test_the_same_step_again_replaces_the_first(tmp_path: Path) -> None:
    for value in (1, 2):
        path = write_checkpoint(tmp_path, snapshot_of(x=torch.tensor(value)))
    assert read_checkpoint(path).entries["x"].tensor.item() == 2
    assert names_in(tmp_path) == ["step-0000000001"]
    assert len(names_in(path)) == 2  # of the files of the first none is left


def test_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    (tmp_path / ".step-0000000001.x.tmp").mkdir()
    (tmp_path / ".step-0000000001.x.tmp" / FILE).write_bytes(b"half")
    write_checkpoint(tmp_path, snapshot_of(2, x=torch.ones(3)))
    assert names_in(tmp_path) == ["step-0000000002"]


def test_no_checkpoint_yet(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "absent", refuse_damage) is None
    (tmp_path / ".step-0000000001.x.tmp").mkdir()  # left by a process that was killed
    (tmp_path / "old-step-0000000001").mkdir()
    assert latest_checkpoint(tmp_path, refuse_damage) is None
    assert latest_checkpoint(None, refuse_damage) is None


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_last_byte(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def reseal(path: Path, **changes: object) -> None:
    """Change an index so that its own checksum fits: a fault of the writer, not of the disk."""
    index = {**json.loads(path.read_text()), **changes}
    del index["sha256"]
    path.write_text(json.dumps({**index, "sha256": index_module._sha256_of_json(index)}))


def reseal_entry(path: Path, name: str = "x", **changes: object) -> None:
    """Change what the index says of its one entry and of the chunk of that."""
    entry = json.loads((path / "index.json").read_text())["entries"]["x"]
    chunk = entry["chunks"][0]
    for key, value in changes.items():
        (chunk if key in chunk else entry)[key] = value
    reseal(path / "index.json", entries={name: entry})


DAMAGE: dict[str, Callable[[Path], object]] = {
    "tensors cut off": lambda path: cut_off(path / FILE),
    "a byte of the tensors flipped": lambda path: flip_last_byte(path / FILE),
    "tensors missing": lambda path: (path / FILE).unlink(),
    "tensors unreadable": lambda path: replace_by_folder(path / FILE),
    "index cut off": lambda path: (path / "index.json").write_bytes((path / "index.json").read_bytes()[:-3]),
    "index empty": lambda path: (path / "index.json").write_bytes(b""),
    "index missing": lambda path: (path / "index.json").unlink(),
    "index of another kind": lambda path: (path / "index.json").write_text("[1, 2]"),
    "index changed": lambda path: (path / "index.json").write_text(
        (path / "index.json").read_text().replace('"samples": 7', '"samples": 8')
    ),
    "index of a newer format": lambda path: reseal(path / "index.json", format=3),
    "index without entries": lambda path: reseal(path / "index.json", entries=None),
    "entry that is not in its file": lambda path: reseal_entry(path, name="y"),
    "another shape in the index": lambda path: reseal_entry(path, length=[4], shape=[4]),
    "another type in the index": lambda path: reseal_entry(path, dtype="int32"),
    "no type in the index": lambda path: reseal_entry(path, dtype="nn"),
    "an unknown kind in the index": lambda path: reseal_entry(path, kind="striped"),
    "a chunk that is not in the index": lambda path: reseal_entry(path, chunks=[]),
    "another checksum in the index": lambda path: reseal_entry(path, sha256="0" * 64),
    "a file that is nowhere": lambda path: reseal_entry(path, file="rank-00009.safetensors"),
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_damage_is_seen_and_the_one_before_is_used(tmp_path: Path, fault: str) -> None:
    write_checkpoint(tmp_path, snapshot_of(1, x=torch.ones(3)))
    path = write_checkpoint(tmp_path, snapshot_of(2, x=torch.ones(3)))
    DAMAGE[fault](path)
    with pytest.raises(CorruptFileError):
        read_checkpoint(path)
    said: list[str] = []
    found = latest_checkpoint(tmp_path, said.append)
    assert found is not None and found.step == 1
    assert len(said) == 1 and "checkpoint" in said[0]


@pytest.mark.parametrize(
    ("fault", "fact"),
    [
        ("tensors missing", "cannot be read: No such file"),
        ("a byte of the tensors flipped", "is damaged: checksum differs"),
        ("another type in the index", r"has another shape or type, torch.float32 \(3,\)"),
        ("a chunk that is not in the index", "is not in the index as a whole"),
    ],
)
def test_a_missing_or_damaged_chunk_is_named(tmp_path: Path, fault: str, fact: str) -> None:
    path = write_checkpoint(tmp_path, snapshot_of(2, x=torch.ones(3)))
    DAMAGE[fault](path)
    place = r"\(entry: x, offset: \(0,\), length: \(3,\), file: .*step-0000000002"
    with pytest.raises(CorruptFileError, match=f"checkpoint chunk {fact}.* {place}"):
        read_checkpoint(path)


def test_damage_to_what_is_not_read_does_no_harm(tmp_path: Path) -> None:
    own = Entry(torch.ones(3), "own")
    path = write_checkpoint(tmp_path, Snapshot(1, {"x": Entry(torch.ones(3)), "z/memory": own}))
    content = (path / FILE).read_bytes()
    (path / FILE).write_bytes(content[:-12] + bytes(12))  # the last tensor of the file
    assert read_checkpoint(path).entries.keys() == {"x"}
    with pytest.raises(CorruptFileError, match="entry: z/memory"):
        read_checkpoint(path, Ranks(consistency="local(steps=2)"))


def test_when_none_is_whole(tmp_path: Path) -> None:
    for step in (1, 2):
        cut_off(write_checkpoint(tmp_path, snapshot_of(step, x=torch.ones(3))) / FILE)
    said: list[str] = []
    with pytest.raises(CorruptFileError, match=r"no checkpoint is whole \(looked at: 2 .*start a new run"):
        latest_checkpoint(tmp_path, said.append)
    assert len(said) == 2


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("flip"), snapshot_of(x=torch.arange(3)))


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), name=st.sampled_from(["index.json", FILE]))
def test_no_flipped_bit_goes_unseen(whole: Path, place: float, bit: int, name: str) -> None:
    content = (whole / name).read_bytes()
    flipped = bytearray(content)
    flipped[int(place * len(content))] ^= 1 << bit
    (whole / name).write_bytes(flipped)
    try:
        found = read_checkpoint(whole)
    except CorruptFileError:
        return
    finally:
        (whole / name).write_bytes(content)
    # White space of the index is all that may change.
    assert name == "index.json" and found.step == 1 and found.progress == {"samples": 7}
    assert torch.equal(found.entries["x"].tensor, torch.arange(3))


def test_a_crash_in_the_middle_leaves_the_old_ones_and_no_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, snapshot_of(1, x=torch.ones(3)))

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    for name, step in (("save_file", 2), ("sync", 2), ("write_index", 2), ("save_file", 1), ("write_index", 1)):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(writing, name, crash)
            write_checkpoint(tmp_path, snapshot_of(step, x=torch.zeros(3)))
        assert names_in(tmp_path) == ["step-0000000001"]
        assert names_in(tmp_path / "step-0000000001") == ["index.json", FILE]
        found = latest_checkpoint(tmp_path, refuse_damage)
        assert found is not None and torch.equal(found.entries["x"].tensor, torch.ones(3))


@contextmanager
def use_small_files(limit: int) -> Iterator[None]:
    """Files that may not grow beyond `limit` bytes: the nearest thing to a full disk that needs no disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [100_000, 1], ids=["while tensors are written", "while the index is written"])
def test_a_full_disk(tmp_path: Path, size: int) -> None:
    # safetensors raises an error of its own, not OSError, when it cannot write.
    write_checkpoint(tmp_path, snapshot_of(1, x=torch.ones(3)))
    snapshot = Snapshot(2, snapshot_of(2, x=torch.ones(size)).entries, {"history": list(range(10_000))})
    with use_small_files(20_000), pytest.raises(StorageError, match="step-0000000002"):
        write_checkpoint(tmp_path, snapshot)
    assert names_in(tmp_path) == ["step-0000000001"]
    assert latest_checkpoint(tmp_path, refuse_damage) is not None


# Never write the golden files again: they stand for the checkpoints that users have.


def read_golden(folder: Path, version: int, ranks: Ranks) -> Snapshot:
    shutil.copytree(GOLDEN / f"checkpoint-{version}", folder, dirs_exist_ok=True)
    found = latest_checkpoint(folder, refuse_damage, ranks)
    assert found is not None and found.step == 3
    assert found.progress == {"samples": 96, "losses": [2.5, math.inf], "sampler": {"epoch": 1, "offset": 32}}
    return found


@pytest.mark.parametrize("version", [1, 2])
def test_every_format_stays_readable(tmp_path: Path, version: int) -> None:
    of_two = [read_golden(tmp_path, version, Ranks(Mesh(rank, data=2))).entries for rank in range(2)]
    alone = read_golden(tmp_path, version, Ranks()).entries
    for entries in (*of_two, alone):
        assert entries["parameter/weight"].tensor.tolist() == [[1.5, -2.0], [0.25, 3.0]]
        assert entries["slot/weight/velocity"].tensor.tolist() == [[1, 2], [3, 4], [5, 6]]
        assert entries["buffer/half"].tensor.dtype == torch.bfloat16
        assert entries["buffer/mask"].tensor.tolist() == [True, False]
        assert entries["optimizer/step"].tensor.shape == ()
    assert [entries["residual"].tensor.tolist() for entries in (*of_two, alone)] == [[0.5, 1.0], [1.5, 3.0], [2.0, 4.0]]
    assert [entries["random"].tensor.tolist() for entries in of_two] == [[1, 2, 3], [4, 5, 6]]


def test_the_second_format_has_boxes_statistics_and_nothing(tmp_path: Path) -> None:
    entries = read_golden(tmp_path, 2, Ranks()).entries
    assert torch.equal(entries["parameter/columns"].tensor, torch.arange(8).view(2, 4))
    assert entries["buffer/half"].tensor.tolist() == [1.0, 1.5] and entries["nothing"].tensor.shape == (0, 3)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.safetensors"])
def test_damage_in_the_first_format_is_seen_by_the_checksum_of_the_file(tmp_path: Path, name: str) -> None:
    shutil.copytree(GOLDEN / "checkpoint-1", tmp_path, dirs_exist_ok=True)
    flip_last_byte(tmp_path / "step-0000000003" / name)
    with pytest.raises(CorruptFileError, match=f"cannot be read: checksum of the file differs .*{name}"):
        read_checkpoint(tmp_path / "step-0000000003")


def test_running_statistics_of_the_first_format_stand_for_their_mean() -> None:
    facts = {"layout": {"kind": "per_rank"}, "dtype": "float32", "shapes": [[2], [2]]}
    kinds = [index_module._row_from_format_1(name, facts).kind for name in ("buffer/mean", "random", "local/round")]
    assert kinds == ["mean", "own", "own"]
