"""The line of a user's script on a stack: not Weft's, PyTorch's or Python's, and a library's only where none is."""

import contextlib
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from weft.script_lines import NOWHERE, ScriptLine, find_script_frame, is_script_file, line_at, line_of_frame

SITE_PACKAGES = Path(torch.__file__).parents[1]


def test_a_hook_called_by_autograd_belongs_to_the_line_of_its_backward() -> None:
    found: list[ScriptLine] = []
    weight = torch.ones(2, requires_grad=True)

    def hook(_: torch.Tensor) -> None:
        above = sys._getframe(1)  # this function is a user's too
        found.append(line_of_frame(find_script_frame(above)))

    weight.register_post_accumulate_grad_hook(hook)
    weight.sum().backward()
    assert found[0].text == "weight.sum().backward()"
    assert found[0].function.startswith("test_a_hook") and Path(found[0].file).name == "test_script_lines.py"


def run_in(file: str, body: str, **names: Any) -> dict[str, Any]:
    """Run code as if it were in that file."""
    exec(compile(body, file, "exec"), names)
    return names


def frame_of(file: str, inner: str = "found = here()") -> FrameType | None:
    return run_in(file, inner, here=lambda: find_script_frame(sys._getframe(1)))["found"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("file", "is_the_users"),
    [
        ("/home/me/train.py", True),
        (str(SITE_PACKAGES / "transformers" / "trainer.py"), True),
        (torch.__file__, False),
        (contextlib.__file__, False),
        (str(Path(__file__).parents[1] / "weft" / "specs" / "plan.py"), False),
        ("<frozen runpy>", False),
    ],
)
def test_whose_file_it_is(file: str, is_the_users: bool) -> None:
    assert is_script_file(file) == is_the_users


def test_the_users_own_file_goes_before_a_library_inside_of_it() -> None:
    frame = frame_of(str(SITE_PACKAGES / "tqdm" / "std.py"))
    assert frame is not None and frame.f_code.co_filename == __file__
    frame = frame_of("/home/me/train.py")
    assert frame is not None and frame.f_code.co_filename == "/home/me/train.py"


def test_the_line_of_an_instruction_is_that_of_the_frame() -> None:
    frame = sys._getframe()
    instruction, number = frame.f_lasti, frame.f_lineno  # both of this line
    found = line_at(frame.f_code, instruction)
    assert (found.line, found.function) == (number, frame.f_code.co_name)
    assert found.text.startswith("instruction, number =")


def test_a_line_is_told_with_its_function_and_text() -> None:
    assert str(ScriptLine("train.py", 12, "main", "loss.backward()")) == "train.py:12 in main: loss.backward()"
    assert str(ScriptLine("train.py", 12, "<module>", "")) == "train.py:12"
    assert line_of_frame(None) is NOWHERE
