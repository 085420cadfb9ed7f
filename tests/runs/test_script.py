"""A script as a rank program: it finds what `python script.py` would."""

import sys
from pathlib import Path

import pytest

from weft.runs.script import run_script


def test_a_script_imports_the_modules_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_beside_script.py").write_text("VALUE = 5\n")
    script = tmp_path / "script.py"
    told = tmp_path / "told"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from module_beside_script import VALUE\n"
        "Path(sys.argv[1]).write_text(f'{VALUE} {__name__}')\n"
    )
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    run_script(str(script), [str(told)])
    assert told.read_text() == "5 __main__"
