"""Ranks that average in pairs, simulated: one is lost, the others go on, and the run is repeated."""

from pathlib import Path

from weft.distributed.group.faulty import Kill
from weft.recipes import find_recipe
from weft.records.run_folder import create_run_folder
from weft.simulation import Simulation, simulate

PLAN = "data=4 consistency=gossip(ring,mix=pair)"
RECIPE = find_recipe("digits_mlp").with_setting("plan", PLAN).with_setting("epochs", "2")


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
