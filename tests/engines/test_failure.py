"""Failures as data: users see their own lines, as Python shows them, and not Weft's."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.atomic import write_text
from weft.engines.failure import Failure, describe
from weft.errors import PlanError
from weft.specs import parse_plan


def failure_of(function: Callable[[], Any]) -> Failure:
    with pytest.raises(BaseException) as raised:
        function()
    return describe(raised.value, 1)


def raise_from_cause() -> None:
    try:
        dict[str, int]()["a"]
    except KeyError as error:
        raise ValueError("seven is not six") from error


def call_weft() -> None:
    parse_plan("data=2 consistency=quick")


def call_weft_in_backward() -> None:
    loss = torch.ones(1, requires_grad=True)
    loss.register_hook(parse_plan)
    loss.backward()


def test_own_errors_are_shown_with_their_causes() -> None:
    failure = failure_of(raise_from_cause)
    assert (failure.kind, failure.text, failure.exit_code) == ("ValueError", "ValueError: seven is not six", 3)
    assert failure.shown == failure.traceback
    assert "KeyError: 'a'\n\nThe above exception was the direct cause" in failure.shown
    assert failure.frames[-1].text == 'raise ValueError("seven is not six") from error'
    assert failure.where == f"{__file__}:{failure.frames[-1].line}"


def test_an_error_of_weft_points_to_the_line_that_called_it() -> None:
    failure = failure_of(call_weft)
    assert (failure.kind, failure.exit_code) == (PlanError.__name__, 2)
    assert failure.text.startswith("unknown value in a plan (consistency: quick)")
    assert failure.frames[-1].text == 'parse_plan("data=2 consistency=quick")'
    assert "parsing.py" in failure.traceback and "parsing.py" not in failure.shown
    assert failure.shown.endswith(f"weft.errors.PlanError: {failure.text}\n")


def test_an_error_inside_weft_that_is_none_of_its_own_says_how_to_see_more() -> None:
    failure = failure_of(lambda: parse_plan(5))  # type: ignore[arg-type]
    assert "parse_plan(5)" in failure.shown and failure.shown.endswith("(raised inside Weft; --debug shows where)\n")


def test_libraries_stay_where_they_raised_the_error() -> None:
    failure = failure_of(lambda: torch.nn.functional.linear(torch.ones(2), torch.ones(3, 3)))
    assert failure.shown == failure.traceback and failure.kind == "RuntimeError"


def test_libraries_on_the_way_to_weft_are_left_out() -> None:
    """Autograd calls a hook of ours: the user's line is that of backward."""
    failure = failure_of(call_weft_in_backward)
    assert failure.frames[-1].text == "loss.backward()"
    assert "torch/" in failure.traceback and "torch/" not in failure.shown


def test_what_weft_caught_before_it_raised_is_its_own_affair(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    failure = failure_of(lambda: write_text(file / "below", "a file is no folder"))
    assert "The above exception" in failure.traceback and "The above exception" not in failure.shown
    assert "weft.errors.StorageError: file could not be written" in failure.shown


def test_where_no_line_is_the_users_the_text_says_all_or_the_traceback_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.engines.failure._is_own", lambda frame: False)
    assert failure_of(call_weft).shown == ""
    other = failure_of(raise_from_cause)
    assert other.shown == other.traceback and other.frames == ()


def test_a_script_that_cannot_be_read_shows_its_line_alone() -> None:
    failure = failure_of(lambda: compile("x = = 1\n", "train.py", "exec"))
    assert 'File "train.py", line 1' in failure.shown and "SyntaxError: invalid syntax" in failure.shown


def test_groups_notes_and_texts_that_fail_are_no_reason_to_fail() -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    odd = OddError()
    odd.add_note("a note")
    failure = describe(ExceptionGroup("several", [odd, ValueError("b")]), 0)
    assert "a note" in failure.shown and "ValueError: b" in failure.shown
    assert describe(odd, 0).text == "OddError: <an error whose text cannot be made>"


def test_a_failure_survives_its_file() -> None:
    failure = failure_of(raise_from_cause)
    assert Failure.from_json({**asdict(failure), "frames": [asdict(frame) for frame in failure.frames]}) == failure
