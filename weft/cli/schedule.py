"""`weft schedule`: the micro-batches of a pipeline, drawn."""

from typing import Annotated

import typer

from weft.cli.options import Json

__all__ = ["schedule"]


def schedule(
    plan: Annotated[
        str, typer.Argument(metavar="PLAN", help='Stages and their order, as in "pipeline=4 schedule=1f1b(8)".')
    ],
    json: Json = False,
) -> None:
    """Draw which stage of a pipeline does what when."""
    from weft.cli.output import print_json
    from weft.console import output_console
    from weft.distributed.placement.pipeline import schedule_of
    from weft.distributed.placement.pipeline.drawing import draw, legend
    from weft.distributed.placement.pipeline.timeline import most_in_flight, play
    from weft.errors import PlanError
    from weft.specs import parse_plan

    chosen = parse_plan(plan)
    if chosen.pipeline == 1:
        raise PlanError(f"plan has one stage, and nothing to draw ({chosen}); add pipeline=2")
    found = schedule_of(chosen.pipeline, chosen.schedule)
    if json:
        timeline = play(found)
        print_json(
            {
                "plan": str(chosen),
                "num_micro": found.num_micro,
                "num_chunks": found.num_chunks,
                "idle_share": timeline.idle_share,
                "in_flight": [most_in_flight(row) for row in found.stages],
                "stages": [
                    [{"action": action, "begin": begin, "end": end} for action, begin, end in row]
                    for row in timeline.spans
                ],
            }
        )
    else:
        lines = [*draw(found), "", *legend(found)]
        output_console().print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
