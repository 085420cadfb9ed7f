"""record.json: exact there and back, readable for ever, and every kind of damage seen and named."""

import errno
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import CorruptFileError, RunFolderError, StorageError, UsageError
from weft.records import record_file
from weft.records.record import Evaluation, Repetition, RunRecord, Verdict
from weft.records.record_file import CLOCK_RULES, migrate, new_record, read_record, write_record

DEEP = b'{"schema": 1, "a": ' + b"[" * 600 + b"]" * 600 + b"}"
GOLDEN = Path(__file__).parents[1] / "golden"

texts = st.text(max_size=5) | st.sampled_from(["inf", "nan", "\\inf"])
numbers = st.floats()
values = st.dictionaries(texts, numbers, max_size=3)
anything = st.dictionaries(
    texts, st.recursive(numbers | texts | st.none(), lambda x: st.lists(x, max_size=2)), max_size=3
)
evaluations = st.builds(Evaluation, st.integers(), st.integers(), numbers, numbers, values)
repetitions = st.builds(
    Repetition,
    seed=st.integers(0, 2**64),
    status=st.sampled_from(["running", "done", "failed", "interrupted"]),
    stop_reason=texts,
    data_checksum=texts,
    evaluations=st.lists(evaluations, max_size=2).map(tuple),
    values=values,
    series=st.dictionaries(texts, st.lists(numbers, max_size=3).map(tuple), max_size=2),
    hashes=st.dictionaries(texts, texts, max_size=2),
)
records = st.builds(
    RunRecord,
    name=texts,
    recipe=anything,
    fixed_hash=texts,
    created=texts,
    clock_rules=texts,
    source=anything,
    versions=st.dictionaries(texts, texts, max_size=2),
    machine=anything,
    repetitions=st.lists(repetitions, max_size=2).map(tuple),
    verdicts=st.lists(st.builds(Verdict, texts, numbers, st.booleans()), max_size=2).map(tuple),
)


def full_record() -> RunRecord:
    """One of everything, as it stands in the golden file of schema 1."""
    evaluation = Evaluation(step=7, samples=448, epoch=0.5, seconds=0.25, values={"validation/loss": 0.75})
    done = Repetition(
        seed=3,
        status="done",
        stop_reason="target reached",
        data_checksum="ab" * 32,
        evaluations=(evaluation,),
        values={"test/accuracy": 0.9722222222222222, "time_to_target": math.inf, "energy": math.nan},
        series={"train/loss": (2.302585092994046, 0.1, -math.inf)},
        hashes={"parameters": "cd" * 32},
    )
    failed = Repetition(seed=4, status="failed", stop_reason="inf", data_checksum="")
    return RunRecord(
        name="tiny",
        recipe={"fixed": {"model": {"name": "mlp", "options": {"hidden": [64, 32]}}}, "norm": "inf", "clip": math.inf},
        fixed_hash="0123abcd",
        created="2026-01-02T03:04:05+00:00",
        clock_rules="the clock starts when it starts",
        source={"commit": "ef" * 20, "dirty": True},
        versions={"python": "3.11.7", "torch": "2.13.0+cpu"},
        machine={"cpu": "a processor — of some make", "cores": 2, "cuda_devices": []},
        repetitions=(done, failed),
        verdicts=(
            Verdict("test/accuracy >= 0.97", 0.9722222222222222, True),
            Verdict("wall_clock <= 1", math.inf, False),
        ),
    )


@given(record=records)
def test_there_and_back(tmp_path_factory: pytest.TempPathFactory, record: RunRecord) -> None:
    folder = tmp_path_factory.mktemp("run")
    write_record(folder, record)
    assert repr(read_record(folder)) == repr(record)  # as text, since not-a-number does not equal itself


def test_a_record_is_read_by_folder_or_file(tmp_path: Path) -> None:
    write_record(tmp_path, full_record())
    assert repr(read_record(tmp_path)) == repr(read_record(tmp_path / "record.json")) == repr(full_record())


def test_the_first_schema_stays_readable_for_ever() -> None:
    assert repr(read_record(GOLDEN / "record-1.json")) == repr(full_record())


def test_any_program_can_read_the_file(tmp_path: Path) -> None:
    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is not JSON")

    write_record(tmp_path, full_record())
    content = json.loads((tmp_path / "record.json").read_text(encoding="ascii"), parse_constant=refuse)
    assert content["repetitions"][0]["values"]["time_to_target"] == "inf"


def test_anyone_can_check_the_seal(tmp_path: Path) -> None:
    write_record(tmp_path, full_record())
    content = json.loads((tmp_path / "record.json").read_text())
    seal = content.pop("sha256")
    assert seal == sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def test_a_new_record_knows_what_is_known_before_the_first_step(tmp_path: Path) -> None:
    record = new_record("tiny", {"hidden": (64, 32), "clip": math.inf}, "0123")
    assert record.clock_rules == CLOCK_RULES
    assert record.recipe == {"hidden": [64, 32], "clip": math.inf}
    assert {"python", "torch", "numpy", "scipy", "weft"} <= record.versions.keys()
    assert record.created.endswith("+00:00") and record.machine["cores"] >= 1
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record


def test_a_full_disk_leaves_the_record_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_record(tmp_path, full_record())
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(StorageError, match="No space left"):
        write_record(tmp_path, replace(full_record(), name="other"))
    assert read_record(tmp_path).name == "tiny"


def damaged(tmp_path: Path, change: Callable[[dict[str, Any]], object], *, reseal: bool = True) -> Path:
    """The golden record after a change to its content, sealed again as a clever forger would."""
    content = json.loads((GOLDEN / "record-1.json").read_text())
    change(content)
    if reseal:
        content.pop("sha256", None)
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        content["sha256"] = sha256(canonical.encode()).hexdigest()
    file = tmp_path / "record.json"
    file.write_text(json.dumps(content))
    return file


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda c: c.update(colour="red"), r"unknown key \(record.colour\)"),
        (lambda c: c["repetitions"][0].update(colour="red"), r"unknown key \(record.repetitions\[0\].colour\)"),
        (lambda c: c.pop("machine"), r"lacks a key \(record.machine\)"),
        (lambda c: c["repetitions"][0]["evaluations"][0].pop("step"), r"lacks a key \(.*evaluations\[0\].step\)"),
        (lambda c: c.update(name=3), r"wrong type \(record.name: 3\)"),
        (lambda c: c.update(verdicts={}), r"wrong type \(record.verdicts: {}\)"),
        (lambda c: c["verdicts"][0].update(passed=1), r"wrong type \(record.verdicts\[0\].passed: 1\)"),
        (lambda c: c["repetitions"][0].update(status="happy"), r"wrong type \(.*status: 'happy'\)"),
        (lambda c: c["repetitions"][0].update(seed=True), r"wrong type \(.*seed: True\)"),
        (lambda c: c["repetitions"][0]["values"].update(loss="low"), r"wrong type \(.*values.loss: 'low'\)"),
        (lambda c: c.update(schema=0), r"schema that never was \(0\)"),
        (lambda c: c.update(schema="1"), "file is not a run record"),
        (lambda c: c.pop("schema"), "file is not a run record"),
    ],
)
def test_damage_inside_is_named(tmp_path: Path, change: Callable[[dict[str, Any]], object], fact: str) -> None:
    file = damaged(tmp_path, change)
    with pytest.raises(CorruptFileError, match=fact) as caught:
        read_record(file)
    assert f"; restore {file} from a copy" in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["repetitions"][0]["values"].update({"test/accuracy": 0.99}),
        lambda c: c["verdicts"].pop(),
        lambda c: c.pop("sha256"),
        lambda c: c.update(sha256="0" * 64),
    ],
)
def test_a_change_without_a_new_seal_is_seen(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(CorruptFileError, match="was changed after it was written"):
        read_record(damaged(tmp_path, change, reseal=False))


def test_layout_is_not_content(tmp_path: Path) -> None:
    assert repr(read_record(damaged(tmp_path, lambda c: None, reseal=False))) == repr(full_record())


def test_a_file_cut_off_anywhere_is_seen(tmp_path: Path) -> None:
    whole = (GOLDEN / "record-1.json").read_bytes().rstrip()
    for length in range(0, len(whole), 97):
        (tmp_path / "record.json").write_bytes(whole[:length])
        with pytest.raises(CorruptFileError, match="cut off or not JSON"):
            read_record(tmp_path)


@pytest.mark.parametrize(
    "content", [b"[]", b"3", b"null", b"{}", b'{"schema": true}', b"\xff\xfe", b'{"schema": NaN}', DEEP]
)
def test_what_is_not_a_record_is_seen(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "record.json").write_bytes(content)
    with pytest.raises(CorruptFileError, match="run record"):
        read_record(tmp_path)


def test_a_record_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "record.json").mkdir()
    with pytest.raises(RunFolderError, match=r"cannot be read .*Is a directory"):
        read_record(tmp_path)


def test_a_missing_record_is_a_wrong_run_folder(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(RunFolderError, match="no run record here"):
            read_record(path)


def test_a_newer_schema_asks_for_an_update(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"newer Weft .*schema: 99, known: \d+\); update Weft"):
        read_record(damaged(tmp_path, lambda c: c.update(schema=99), reseal=False))


def test_migrations_run_in_order() -> None:
    migrations: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {
        1: lambda c: {**c, "path": ["from 1"]},
        2: lambda c: {**c, "path": [*c["path"], f"from {c['schema']}"]},
    }
    assert migrate({"schema": 1}, migrations, 3) == {"schema": 3, "path": ["from 1", "from 2"]}
    assert migrate({"schema": 3}, migrations, 3) == {"schema": 3}
    with pytest.raises(ValueError, match="never was"):
        migrate({"schema": 0}, migrations, 3)


def test_an_older_file_is_read_through_its_migration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def name_from_title(content: dict[str, Any]) -> dict[str, Any]:
        assert content["repetitions"][0]["values"]["time_to_target"] == math.inf  # numbers, not their text
        name = content.pop("title")
        return {**content, "name": name}

    def rename(content: dict[str, Any]) -> None:
        content.update(schema=0, title=content.pop("name"))

    monkeypatch.setitem(record_file.MIGRATIONS, 0, name_from_title)
    assert repr(read_record(damaged(tmp_path, rename))) == repr(full_record())
