"""One JSON document, or tables, on the standard output."""

import json
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from weft.console import output_console
from weft.records.record import RunRecord
from weft.records.strict_json import encode_json

__all__ = ["print_json", "print_tables", "record_document"]


def print_json(value: Any) -> None:
    """Strict JSON: data classes become objects, infinity becomes a text, as in `record.json`."""
    print(json.dumps(encode_json(value), indent=2, allow_nan=False))


def print_tables(content: RenderableType) -> None:
    output_console().print(content, crop=False)


def record_document(record: RunRecord, path: Path) -> dict[str, Any]:
    """A run as a document for machines. One that has not ended, or failed in part, is not accepted."""
    accepted = record.accepted and all(repetition.status == "done" for repetition in record.repetitions)
    return {"path": str(path), "accepted": accepted, "record": record}
