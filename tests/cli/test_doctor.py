"""`weft doctor`: findings with their cures, and a code that a script can use."""

import io
from typing import Any

import pytest
from rich.console import Console

from weft.cli.inventory import render_checks
from weft.engines.environment import Check

WELL = Check("packages", "torch", "ok", "2.13.0", "", required=True)
ILL = Check("packages", "torch", "broken", "libgomp.so.1: cannot open", "sudo apt-get install libgomp1", required=True)
ABSENT = Check("extras", "ray", "missing", "not installed", "pip install ray", required=False)

GOLDEN = """\
packages
  torch  broken  libgomp.so.1: cannot open; sudo apt-get install libgomp1

extras
  ray  missing  not installed; pip install ray

Weft cannot run here before this is cured: torch
"""


def test_golden_findings() -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(render_checks([ILL, ABSENT]), crop=False)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == GOLDEN


@pytest.mark.parametrize(("checks", "code"), [([WELL, ABSENT], 0), ([ILL, ABSENT], 1)])
def test_code_says_whether_weft_can_run(
    weft: Any, monkeypatch: pytest.MonkeyPatch, checks: list[Check], code: int
) -> None:
    monkeypatch.setattr("weft.engines.environment.check_environment", lambda: checks)
    assert weft("doctor").code == code
    assert weft("doctor", "--json").code == code


def test_this_machine(weft: Any) -> None:
    outcome = weft("doctor")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.splitlines()[-1].startswith("all that Weft needs works here")


def test_json_has_every_finding(weft: Any) -> None:
    checks = weft("doctor", "--json").json
    assert all(set(check) == {"section", "name", "status", "detail", "cure", "required"} for check in checks)
    assert {"python", "torch", "torch (gloo)", "ray"} <= {check["name"] for check in checks}
