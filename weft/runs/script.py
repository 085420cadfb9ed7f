"""A user's own script as a rank program."""

import runpy
import sys

__all__ = ["run_script"]


def run_script(path: str, arguments: list[str]) -> None:
    """Run the file as `python path arguments...` would, in this rank."""
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
