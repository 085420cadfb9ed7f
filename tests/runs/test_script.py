"""A script as a rank program: it finds what `python script.py` and `python -m module` would, and joins or fails."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import weft.distributed.place
from weft.errors import PlanError, UsageError
from weft.runs import script as script_module
from weft.runs.script import Script, choose_plan, run_script

TELL = """
import json, sys
from pathlib import Path
from beside import VALUE
class Mine: pass
main = sys.modules["__main__"]
Path("told").write_text(json.dumps([
    VALUE, sys.argv, sys.path[0], __name__, __file__, str(getattr(__spec__, "name", None)), str(__package__),
    main.__dict__ is globals(), __doc__, Mine.__module__, sorted(key for key in globals() if key.startswith("__")),
    "before" in sys.path, str(Path("told").resolve()), type(__builtins__).__name__,
]))
"""


@pytest.fixture(autouse=True)
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is put back as it was before it ran a script, in a folder above those of the scripts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # which a script's process sets
    monkeypatch.setattr(sys, "argv", ["before"])
    monkeypatch.setattr(sys, "path", ["before", *sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    for name in ("beside", "package", "package.beside"):
        sys.modules.pop(name, None)


def told_by_python(*words: str) -> Any:
    subprocess.run([sys.executable, "-B", *words], check=True, env={**os.environ, "PYTHONPATH": ""})
    return json.loads(Path("told").read_text())


def told_by(script: Script) -> Any:
    Path("told").unlink()
    script.run()
    return json.loads(Path("told").read_text())


def test_a_file_runs_as_python_runs_it() -> None:
    Path("scripts").mkdir()
    Path("scripts/beside.py").write_text("VALUE = 5\n")
    Path("scripts/mine.py").write_text(f'"""Told."""{TELL}')
    words = ("scripts/mine.py", "--workers", "1", "--help", "--")
    assert told_by_python(*words) == told_by(Script(words[0], "", words[1:]))


def test_a_module_runs_as_python_runs_it() -> None:
    Path("package").mkdir()
    Path("package/__init__.py").touch()
    Path("package/beside.py").write_text("VALUE = 5\n")
    Path("package/mine.py").write_text(TELL.replace("from beside", "from .beside"))
    assert told_by_python("-m", "package.mine", "-m", "x") == told_by(Script("", "package.mine", ("-m", "x")))


@pytest.mark.parametrize("code", ["", "None", "0"])
def test_a_script_that_leaves_well_has_ended_well(code: str) -> None:
    Path("leave.py").write_text(f"import sys\nsys.exit({code})\n")
    Script("leave.py").run()


@pytest.mark.parametrize("code", [3, "no data", ""])
def test_a_script_that_leaves_otherwise_has_its_own_exit_code(code: object) -> None:
    Path("leave.py").write_text(f"import sys\nsys.exit({code!r})\n")
    with pytest.raises(SystemExit) as left:
        Script("leave.py").run()
    assert left.value.code == code


def test_a_module_that_is_not_there_is_told_as_python_tells_it() -> None:
    with pytest.raises(SystemExit, match="No module named absent"):
        Script(module="absent").run()


def be_rank(monkeypatch: pytest.MonkeyPatch, *, size: int, has_met: bool) -> None:
    monkeypatch.setattr(weft.distributed.place, "find_launch", lambda: SimpleNamespace(size=size))
    monkeypatch.setattr(weft.distributed.place, "has_met", lambda: has_met)


def test_a_script_whose_ranks_never_met_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it trained N copies, and the launch was a success."""
    Path("alone.py").write_text("")
    alone = Script("alone.py").to_json()
    be_rank(monkeypatch, size=2, has_met=False)
    with pytest.raises(UsageError, match=r"script never joined the other ranks.*\(alone.py\); call weft.weave"):
        run_script(alone)
    for size, has_met in ((2, True), (1, False)):
        be_rank(monkeypatch, size=size, has_met=has_met)
        run_script(alone)


def test_a_script_that_only_tells_how_it_is_used_trains_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    be_rank(monkeypatch, size=2, has_met=False)
    Path("help.py").write_text("import sys; sys.exit(0)")
    run_script(Script("help.py").to_json())
    Path("copies.py").write_text(
        "import sys, torch\np = torch.nn.Parameter(torch.ones(1))\ntorch.optim.SGD([p]).step()\nsys.exit(0)\n"
    )
    with pytest.raises(UsageError, match="script never joined the other ranks"):
        run_script(Script("copies.py").to_json())


def test_a_script_that_takes_long_to_join_is_told_early(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("slow.py").write_text(
        "import threading\n[thread.join() for thread in threading.enumerate() if isinstance(thread, threading.Timer)]\n"
    )
    monkeypatch.setattr(script_module, "NOTE_SECONDS", 0.01)
    monkeypatch.setenv("WEFT_RANK", "0")
    monkeypatch.setenv("WEFT_SIZE", "2")
    be_rank(monkeypatch, size=2, has_met=False)
    with pytest.raises(UsageError):
        run_script(Script("slow.py").to_json())
    assert capsys.readouterr().err.startswith("note: script has not joined the other ranks after 0.01 s (slow.py)")


OWN = "topology=server(shards=1,place=own)"


@pytest.mark.parametrize(
    ("text", "workers", "plan"),
    [
        ("data", None, "data=2"),
        ("data", 4, "data=4"),
        ("data=3 consistency=local(8)", None, "data=3 consistency=local(steps=8)"),
        ("data=3 consistency=local(8)", 3, "data=3 consistency=local(steps=8)"),
        (f"consistency=async {OWN}", 3, f"data=3 consistency=async(lr=share) {OWN}"),
        ("shard", 2, "data=1 shard=2"),
        ("data=2 shard=2", 4, "data=2 shard=2"),
    ],
)
def test_plan_and_workers_fill_each_other_in(text: str, workers: int | None, plan: str) -> None:
    assert str(choose_plan(text, workers)) == plan


def test_a_plan_that_makes_no_sense_is_refused_before_any_rank_starts() -> None:
    assert choose_plan(None, 3) is None
    with pytest.raises(UsageError, match=r"plan and workers differ \(plan: 2, workers: 3\)"):
        choose_plan("data=2", 3)
    with pytest.raises(PlanError, match="unknown word in a plan"):
        choose_plan("dta=2", None)
