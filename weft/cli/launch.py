"""`weft launch`: run a script of one's own on several ranks of this machine."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["launch"]


def launch(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A Python file that calls weft.weave.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENT]...", help="What the script gets.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="Ranks to start.")] = 2,
    logs: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep there what each rank prints, one file a rank.")
    ] = None,
) -> None:
    """Run a script on several ranks; what rank 0 prints is shown."""
    from weft.engines.fork_server import start_fork_server
    from weft.engines.local import run_ranks
    from weft.engines.rank_program import RankProgram
    from weft.errors import UsageError

    if not script.is_file():
        raise UsageError(f"no such script ({script}); give the path of a Python file")
    start_fork_server()
    program = RankProgram("weft.runs.script:run_script", {"path": str(script), "arguments": arguments or []})
    run_ranks(program, workers, silent=True, logs=logs)
