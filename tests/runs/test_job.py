"""The plan of a job whose processes another launcher has started: what it needs may be more than its ranks."""

from dataclasses import replace

import pytest

from weft.errors import UsageError
from weft.recipes import find_recipe
from weft.runs.job import with_plan
from weft.specs import parse_plan

OWN = "data=2 consistency=async topology=server(shards=1,place=own)"


@pytest.mark.parametrize(
    ("plan", "workers", "started", "expected"),
    [
        (None, None, 2, "data=2"),
        ("topology=ring", None, 2, "data=2 topology=ring"),
        (OWN, None, 3, OWN),  # once taken for three workers, and refused
        (OWN.removeprefix("data=2 "), 2, 3, OWN),
        ("data=2", 2, 2, "data=2"),
    ],
)
def test_processes_that_were_started_fill_in_what_is_left_open(
    plan: str | None, workers: int | None, started: int, expected: str
) -> None:
    assert with_plan(find_recipe("digits_mlp"), plan, workers, started).mutable.plan == parse_plan(expected)


def test_a_recipe_whose_plan_fits_keeps_it() -> None:
    """As when a run is resumed: once, two processes made synchronous ranks of any plan."""
    recipe = find_recipe("digits_mlp")
    recipe = replace(recipe, mutable=replace(recipe.mutable, plan=parse_plan(OWN)))
    assert with_plan(recipe, None, None, 3) is recipe
    assert with_plan(recipe, None, None, 2).mutable.plan == parse_plan("data=2")


@pytest.mark.parametrize(("plan", "workers"), [("data=3", None), (None, 3), (OWN, None)])
def test_another_number_of_processes_is_refused_before_anything_is_written(
    plan: str | None, workers: int | None
) -> None:
    with pytest.raises(UsageError, match="start as many"):
        with_plan(find_recipe("digits_mlp"), plan, workers, 2)
