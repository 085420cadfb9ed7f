"""Whether a command that the documentation shows is one that exists."""

import re
import shlex
from pathlib import Path
from typing import Any

import typer.main

from weft.cli.launch import split_launch
from weft.cli.main import app

LAUNCHERS = ("torchrun", "mpirun")


def find_fault(command: str, root: Path) -> str:
    """What is wrong with a command as typed in the root folder; empty if nothing is."""
    words = shlex.split(command.partition(" | ")[0], comments=True)
    while "=" in words[0]:  # a variable of the environment
        words = words[1:]
    if words[0] in LAUNCHERS:
        words = _after_launcher(words)
    if words[0] == "make":
        return _fault_of_make(words[1:], root)
    if words[0] == "python" or words[0].endswith(".py"):
        script = _script_of(words)
        return "" if (root / script).is_file() else f"no such file: {script}"
    if words[0].startswith("scripts/"):
        return "" if (root / words[0]).is_file() else f"no such file: {words[0]}"
    if words[0] == "weft":
        return _fault_of_weft(words[1:], typer.main.get_command(app))
    return f"unknown command: {words[0]}"


def _after_launcher(words: list[str]) -> list[str]:
    """The command that torchrun or mpirun starts; `-m weft` is `weft`."""
    starts = [i for i, word in enumerate(words) if word in ("weft", "python") or word.endswith(".py")]
    return words[starts[0] :] if starts else ["nothing"]


def _script_of(words: list[str]) -> str:
    """The file that Python runs: given as such, or as `-m package.module`."""
    if "-m" in words:
        return words[words.index("-m") + 1].replace(".", "/") + ".py"
    return next((word for word in words if word.endswith(".py")), "nothing")


def _fault_of_make(targets: list[str], root: Path) -> str:
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    missing = [target for target in targets if not re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE)]
    return f"no such target: {missing[0]}" if missing else ""


def _fault_of_weft(words: list[str], command: Any) -> str:
    """Follow sub-commands as far as they go, then look for every option among those of the last."""
    while (commands := getattr(command, "commands", {})) and words and not words[0].startswith("-"):
        if words[0] not in commands:
            return f"no such sub-command: {words[0]}"
        command, words = commands[words[0]], words[1:]
    if command.name == "launch":  # what follows the script is the script's own
        with_value = [spelling for parameter in command.params for spelling in parameter.opts]
        words, _ = split_launch(words, with_value)
    known = {option for parameter in command.params for option in parameter.opts} | {"--help", "--debug"}
    own = words[: words.index("--")] if "--" in words else words  # behind it are a script's
    unknown = [word for word in own if word.startswith("-") and word not in known]
    return f"no such option: {unknown[0]}" if unknown else ""
