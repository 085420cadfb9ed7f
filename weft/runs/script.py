"""A user's own script as a rank program."""

import runpy
import sys
from pathlib import Path

__all__ = ["run_script"]


def run_script(path: str, arguments: list[str]) -> None:
    """Run the file as `python path arguments...` would, in this rank: modules beside it can be imported."""
    sys.argv = [path, *arguments]
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path(path).resolve().parent))
    runpy.run_path(path, run_name="__main__")
