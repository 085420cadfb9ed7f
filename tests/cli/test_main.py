"""Errors become exit codes in one place, and nobody but a programmer sees a traceback."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import weft.runs.job
from weft.cli.signals import use_orderly_end
from weft.errors import CorruptFileError, DivergedError, RecipeError, RunFolderError, StorageError, WeftError


def raising(error: BaseException) -> Callable[..., Any]:
    def run(*arguments: object, **options: object) -> None:
        raise error

    return run


@pytest.fixture
def fail_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Make the training raise this."""
    return lambda error: monkeypatch.setattr(weft.runs.job, "find_recipe", raising(error))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RecipeError("unknown key (lr)"), 2),
        (RunFolderError("folder holds a run already"), 2),
        (CorruptFileError("record is cut off"), 2),
        (DivergedError("loss is not finite"), 3),
        (StorageError("disk is full"), 3),
        (WeftError("something else"), 3),
    ],
)
def test_error_on_purpose_is_one_line_and_its_own_code(
    weft: Any, fail_with: Callable[[BaseException], None], error: WeftError, code: int
) -> None:
    fail_with(error)
    outcome = weft("run", "digits_mlp")
    assert (outcome.code, outcome.out, outcome.err) == (code, "", f"error: {error}\n")


def test_error_text_is_no_markup_and_is_not_wrapped(weft: Any, fail_with: Callable[[BaseException], None]) -> None:
    text = "[bold]bad[/bold] :smile: " + "x" * 300
    fail_with(RecipeError(text))
    assert weft("run", "digits_mlp").err == f"error: {text}\n"


@pytest.mark.parametrize("line", [("--debug", "run", "x"), ("run", "x", "--debug"), ("run", "--debug", "x")])
def test_debug_shows_the_traceback(
    weft: Any, fail_with: Callable[[BaseException], None], line: tuple[str, ...]
) -> None:
    fail_with(RecipeError("unknown recipe (x)"))
    outcome = weft(*line)
    assert outcome.code == 2
    assert outcome.err.startswith("Traceback") and outcome.err.endswith("error: unknown recipe (x)\n")


def test_bug_shows_its_traceback_and_asks_for_a_report(weft: Any, fail_with: Callable[[BaseException], None]) -> None:
    fail_with(ZeroDivisionError("division by zero"))
    outcome = weft("run", "digits_mlp")
    assert outcome.code == 3
    assert "ZeroDivisionError: division by zero" in outcome.err
    assert outcome.err.endswith("report it with the text above and `weft doctor --json`\n")


def test_ctrl_c_before_the_training_is_130_and_told(weft: Any, fail_with: Callable[[BaseException], None]) -> None:
    fail_with(KeyboardInterrupt())
    outcome = weft("run", "digits_mlp")
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "interrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize("module", ["typer", "torch"])
def test_ctrl_c_while_something_is_imported_is_told(tmp_path: Path, module: str) -> None:
    """Once a traceback through half of torch was shown, or nothing."""
    (tmp_path / f"{module}.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    command = [sys.executable, "-m", "weft", "run", "digits_mlp"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    said = "interrupted\n" if module == "typer" else "importing torch\ninterrupted\n"
    assert (done.returncode, done.stdout, done.stderr) == (130, "", said)


def test_a_signal_that_ends_the_command_lets_it_clean_up_first() -> None:
    program = (
        "import signal\n"
        "from weft.cli.signals import use_orderly_end\n"
        "with use_orderly_end():\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
        "    finally:\n"
        "        signal.raise_signal(signal.SIGTERM)\n"  # a second one does not cut this short
        "        print('clean')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "clean\n", "")


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with use_orderly_end():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("is_bug", [False, True])
def test_torchrun_is_told_why_a_rank_failed(
    weft: Any, fail_with: Callable[[BaseException], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_bug: bool
) -> None:
    """In the file from which it makes its table, which has a link to its documentation otherwise."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "folder" / "error.json"))
    fail_with(ZeroDivisionError("0") if is_bug else RecipeError("unknown key (lr)"))
    assert weft("run", "digits_mlp").code == (3 if is_bug else 2)
    assert ("this is a bug in Weft" if is_bug else "error: unknown key (lr)") in table_of_torchrun(tmp_path)


def test_torchrun_is_told_that_a_rule_failed_and_nothing_crashed(
    weft: Any, tiny: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "folder" / "error.json"))
    assert weft("run", *tiny).code == 1
    assert "the run ended well, but an acceptance rule failed" in table_of_torchrun(tmp_path)


def table_of_torchrun(folder: Path) -> str:
    failure = ProcessFailure(0, 1, 1, str(folder / "folder" / "error.json"))
    return str(ChildFailedError("weft", {0: failure}).format_msg())


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (("fly",), "No such command 'fly'"),
        (("run", "--fly"), "No such option: --fly"),
        (("run", "digits_mlp", "--repeat", "0"), "greater than or equal to 1"),
        (("run", "digits_mlp", "--seed", "-1"), "greater than or equal to 0"),
        (("run", "digits_mlp", "--seed", "one"), "valid integer"),
        (("show",), "Missing argument 'RUN'"),
        (("compare", "a"), "Missing argument 'RUN_B'"),
    ],
)
def test_wrong_use_is_2(weft: Any, line: tuple[str, ...], text: str) -> None:
    outcome = weft(*line)
    assert outcome.code == 2 and text in outcome.err and outcome.out == ""


def test_version(weft: Any) -> None:
    outcome = weft("--version")
    assert (outcome.code, outcome.out) == (0, f"weft {metadata.version('weft')}\n")


def test_help_names_every_command_and_exit_code(weft: Any) -> None:
    outcome = weft("--help")
    assert outcome.code == 0
    assert all(f"\n  {command} " in outcome.out for command in ("run", "show", "compare", "list", "doctor"))
    assert re.search(r"0 done and accepted.*1 an.*2 wrong use.*3\s+training failed.*130 interrupted", outcome.out, re.S)


def test_help_answers_before_torch_is_imported() -> None:
    check = "import sys, weft.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "weft", "fly"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "No such command 'fly'" in done.stderr
