"""A script on virtual ranks, for tests: servers and responders of its plan are virtual ranks too."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.distributed.virtual_plan import FREE
from weft.distributed.group import AbstractGroup
from weft.distributed.place.topology import algorithm_of
from weft.distributed.script.observation.supervision import Supervision
from weft.distributed.script.weaving.weaving import use_weavings
from weft.distributed.script.world.world import World, use_world
from weft.distributed.virtual import run_virtual
from weft.simulation.place import VirtualPlace
from weft.specs import Plan, parse_plan_for

__all__ = ["run_script"]


def run_script(
    script: Callable[[], Any],
    size: int,
    plan: Plan | str | None = None,
    *,
    run: Path | None = None,
    replay: Path | None = None,
) -> list[Any]:
    """What it returns on each rank.

    Args:
        plan: that of the command, before the script's own.
    """
    chosen, shared = parse_plan_for("data" if plan is None else plan, size), dict[str, Any]()

    def program(group: AbstractGroup) -> Any:
        place, supervision = VirtualPlace(group, (), FREE, shared), Supervision(run=run, replay=replay)
        world = World(place, None if plan is None else chosen, supervision)
        with use_world(world), suppress(SystemExit), use_weavings(world):
            return script()

    ended = run_virtual(program, chosen.roles.num_addresses, choice=algorithm_of(chosen), timeout=1e6)
    return list(ended.results[:size])
