"""`record.json`: a run record on disk, strict JSON, sealed by a hash of its own content.

The layout of the file is that of the data classes in record.py. A change there needs a new SCHEMA and an entry in
MIGRATIONS, so that every record ever written stays readable.
"""

import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from weft.atomic import write_json
from weft.errors import CorruptFileError, RunFolderError, UsageError
from weft.records.machine import describe_machine, describe_source, describe_versions
from weft.records.record import SCHEMA, RunRecord
from weft.records.strict_json import decode_json, encode_json, parse_json

__all__ = ["CLOCK_RULES", "RECORD_NAME", "new_record", "read_record", "write_record"]

RECORD_NAME = "record.json"
CLOCK_RULES = (
    "the clock starts at the first touch of the data, includes evaluation and checkpoints, and is never paused"
)

Content = dict[str, Any]

MIGRATIONS: dict[int, Callable[[Content], Content]] = {}
"""By the schema it starts from: what turns the content of a record into that of the next schema."""


def new_record(name: str, recipe: Mapping[str, Any] | None = None, fixed_hash: str = "") -> RunRecord:
    """A record with no repetition yet, and with everything that is known before the first one."""
    return RunRecord(
        name=name,
        recipe=decode_json(encode_json(recipe or {})),  # as it will be read back: lists, not tuples
        fixed_hash=fixed_hash,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        clock_rules=CLOCK_RULES,
        source=describe_source(),
        versions=describe_versions(),
        machine=describe_machine(),
    )


def write_record(folder: Path, record: RunRecord) -> None:
    """Write `record.json` into the folder, whole or not at all, over the one that is there."""
    assert record.schema == SCHEMA, f"only schema {SCHEMA} is written"
    content = encode_json(record)
    write_json(folder / RECORD_NAME, {**content, "sha256": _seal(content)})


def read_record(folder_or_file: Path) -> RunRecord:
    """The record of a run folder, or of a record file by any name.

    Raises:
        RunFolderError: there is no such file.
        CorruptFileError: the file is not a record, is cut off, or was changed after it was written.
        UsageError: a newer Weft wrote it.
    """
    file = folder_or_file / RECORD_NAME if folder_or_file.is_dir() else folder_or_file
    content = _parse(file)
    if not isinstance(content, dict) or type(content.get("schema")) is not int:
        raise _corrupt(file, "file is not a run record")
    if content["schema"] > SCHEMA:
        versions = f"schema: {content['schema']}, known: {SCHEMA}"
        raise UsageError(f"run record was written by a newer Weft ({file}, {versions}); update Weft")
    try:
        return _unseal(content)
    except (ValueError, RecursionError) as error:
        raise _corrupt(file, f"run record {error}") from None


def migrate(content: Content, migrations: Mapping[int, Callable[[Content], Content]], schema: int) -> Content:
    """The content of an older record, one schema after the other up to `schema`."""
    for version in range(content["schema"], schema):
        if version not in migrations:
            raise ValueError(f"has a schema that never was ({version})")
        content = {**migrations[version](content), "schema": version + 1}
    return content


def _parse(file: Path) -> Any:
    try:
        return parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunFolderError(f"no run record here ({file}); give a folder that `weft run` made") from None
    except OSError as error:
        raise RunFolderError(f"run record cannot be read ({file}: {error.strerror}); give one that can") from None
    except ValueError as error:
        raise _corrupt(file, f"run record is cut off or not JSON ({error})") from None


def _unseal(content: Content) -> RunRecord:
    """The record in the content of a file. A fault is a ValueError that goes on from the words "run record"."""
    content = dict(content)
    if content.pop("sha256", None) != _seal(content):
        raise ValueError("was changed after it was written (its sha256 does not fit its content)")
    record = _read_as(RunRecord, migrate(decode_json(content), MIGRATIONS, SCHEMA), "record")
    assert isinstance(record, RunRecord)
    return record


def _seal(content: Content) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return sha256(canonical.encode()).hexdigest()


def _read_as(annotation: Any, value: Any, where: str) -> Any:
    """The value as the annotated type; `where` is its path in the file, for the error."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return value
    if is_dataclass(annotation) and isinstance(value, dict):
        return _read_dataclass(annotation, value, where)
    if origin is dict and isinstance(value, dict):
        return {key: _read_as(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is tuple and isinstance(value, list):
        return tuple(_read_as(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is Literal and value in arguments:
        return value
    if annotation is float and type(value) in (int, float):
        return float(value)
    if annotation in (str, int, bool) and type(value) is annotation:
        return value
    raise ValueError(f"has a value of the wrong type ({where}: {value!r})")


def _read_dataclass(kind: Any, value: Content, where: str) -> Any:
    hints = typing.get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    unknown, missing = sorted(value.keys() - set(names)), [name for name in names if name not in value]
    if unknown:
        raise ValueError(f"has an unknown key ({where}.{unknown[0]})")
    if missing:
        raise ValueError(f"lacks a key ({where}.{missing[0]})")
    return kind(**{name: _read_as(hints[name], value[name], f"{where}.{name}") for name in names})


def _corrupt(file: Path, fact: str) -> CorruptFileError:
    return CorruptFileError(f"{fact}; restore {file} from a copy, or run again")
