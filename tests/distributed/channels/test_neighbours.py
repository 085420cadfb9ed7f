"""Ranks that average in pairs: which process is which, simulations, and the proof on real processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from weft.distributed.group import AbstractGroup
from weft.distributed.group.faulty import Kill
from weft.distributed.group.virtual import run_virtual
from weft.distributed.placement import carry_out
from weft.distributed.place.launched import Place
from weft.distributed.channels.servers import Service, tolerance_of, use_replicas
from weft.simulation.simulate import Simulation, simulate
from weft.errors import PlanError
from weft.records.run_folder import create_run_folder
from weft.recipes import find_recipe
from weft.specs import parse_plan

PLAN = "data=4 consistency=gossip(ring,mix=pair)"
RECIPE = find_recipe("digits_mlp").with_setting("plan", PLAN).with_setting("epochs", "2")


def test_only_rank_0_cannot_be_done_without() -> None:
    plan = parse_plan(PLAN)
    assert tolerance_of(plan).expendable == frozenset({1, 2, 3})
    assert (plan.num_processes, plan.num_addresses) == (4, 8)


def test_another_number_of_processes_is_refused() -> None:
    with (
        pytest.raises(PlanError, match="another number of processes"),
        use_replicas(Service(RECIPE, (0,)), Place("weft", 0, 2, "", 2)),
    ):
        pass


def test_a_group_cannot_carry_it_out() -> None:
    def program(group: AbstractGroup) -> None:
        carry_out(parse_plan("data=2 consistency=gossip(mix=pair)"), group)

    with pytest.raises(PlanError, match="by mail, not in a group"):
        run_virtual(program, 2)


def run(folder: Path, replay: Path | None = None, kill: int | None = None) -> Simulation:
    faults = [] if kill is None else [Kill(kill, after_seconds=0.1)]
    recipe = RECIPE.with_setting("batch_size", "128")
    return simulate(
        recipe, folder=create_run_folder(folder, "run"), seeds=(0, 1), compute=0.01, replay=replay, faults=faults
    )


def test_a_simulation_loses_a_rank_goes_on_and_is_replayed(tmp_path: Path) -> None:
    """Both seeds: the second begins without the rank."""
    first = run(tmp_path / "first", kill=3)
    again = run(tmp_path / "again", replay=tmp_path / "first")
    assert [one.hashes for one in again.record.repetitions] == [one.hashes for one in first.record.repetitions]
    assert [repetition.values["lost_ranks"] for repetition in first.record.repetitions] == [1, 1]
    assert all(repetition.values["consensus_distance"] > 0 for repetition in first.record.repetitions)


@pytest.mark.slow
def test_a_plan_that_averages_in_pairs_is_proved() -> None:
    command = [sys.executable, "-m", "weft", "prove", "digits_mlp", "--plan", PLAN, "--seeds", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "4 ranks averaged by the equations" in done.stdout and "to the last bit" in done.stdout
