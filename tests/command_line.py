"""The command line in this process, whose fork server starts the ranks: what it printed and its exit code."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from weft.cli.main import main


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The standard output, which must be one strict JSON document."""
        return json.loads(self.out, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))


Weft = Callable[..., Outcome]


def run_weft(capture: pytest.CaptureFixture[str], *arguments: str | Path) -> Outcome:
    """`run_weft(capsys, "run", "digits_mlp")`, as `weft run digits_mlp`. capfd also has what the ranks printed."""
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    captured = capture.readouterr()
    code = left.value.code
    return Outcome(code if isinstance(code, int) else 0, captured.out, captured.err)
