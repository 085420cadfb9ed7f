"""One JSON document, or tables, on the standard output."""

import json
from typing import Any

from rich.console import RenderableType

from weft.cli.console import output_console
from weft.metrics.strict_json import encode_json

__all__ = ["print_json", "print_tables"]


def print_json(value: Any) -> None:
    """Strict JSON: data classes become objects, infinity becomes a text, as in `record.json`."""
    print(json.dumps(encode_json(value), indent=2, allow_nan=False))


def print_tables(content: RenderableType) -> None:
    output_console().print(content, crop=False)
