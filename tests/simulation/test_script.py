"""Scripts on the virtual cluster: the parameters of real ranks, in a time that is the same twice."""

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.small_script import HEAD, LOOP, SCRIPT, write_script
from weft.distributed.virtual import AbstractProcessState, run_virtual
from weft.errors import RankFailedError, UsageError
from weft.planning.cluster import Link
from weft.planning.network import NetworkModel
from weft.simulation.script import ScriptSimulation, simulate_script
from weft.simulation.script_process import ScriptState, use_script_process
from weft.simulation.stragglers import parse_failures, parse_stragglers

SLOW = NetworkModel(Link(alpha=0.001, beta=0.0))


def simulate(folder: Path, text: str = SCRIPT, *, num_ranks: int = 2, **options: object) -> ScriptSimulation:
    chosen = {"compute": 0.01, "network": SLOW, **options}
    return simulate_script(write_script(folder, text), ["this"], num_ranks=num_ranks, **chosen)  # type: ignore[arg-type]


def test_two_simulations_are_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, again = simulate(tmp_path, num_ranks=3), simulate(tmp_path, num_ranks=3)
    assert first.__dict__ | {"real_seconds": 0} == again.__dict__ | {"real_seconds": 0}
    assert (first.num_steps, first.num_ranks) == (6, 3) and len(set(first.digests)) == 1
    assert capsys.readouterr().out == "loss of this is small\n" * 2


def test_a_step_is_its_computation_and_the_waiting_that_shows(tmp_path: Path) -> None:
    """Six steps of 10 ms; the gradients of the last layer set out while those of the first are computed."""
    found = simulate(tmp_path)
    assert 0.01 < found.step_seconds < 0.01 + 4 * 0.001
    assert found.compute_seconds == 0.01 and 0 < found.waiting_share < 0.5
    assert found.step_seconds == pytest.approx(0.01 + found.exposed_seconds) and found.exposed_seconds > 0
    assert simulate(tmp_path, network=NetworkModel(Link(alpha=0.0, beta=0.0))).step_seconds == pytest.approx(0.01)


def test_the_plan_is_the_scripts_own_where_none_is_given(tmp_path: Path) -> None:
    text = SCRIPT.replace("optimizer, loader)", "optimizer, loader, plan='data topology=ring')")
    found = simulate(tmp_path, text, num_ranks=4)
    assert found.plan == "data=4 topology=ring" and found.num_messages > simulate(tmp_path, num_ranks=4).num_messages


def test_a_straggler_slows_all(tmp_path: Path) -> None:
    slow = simulate(tmp_path, stragglers=parse_stragglers("rank 1 2x slower"))
    assert slow.step_seconds > 0.02 > simulate(tmp_path).step_seconds


def test_a_rank_that_dies_ends_a_synchronous_script(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="rank 1 is lost"):
        simulate(tmp_path, faults=parse_failures("rank 1 at 0.02 s", 2))


def test_computation_is_measured_where_it_is_not_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = simulate(tmp_path, compute=None)
    assert found.compute_seconds > 0 and found.num_steps == 6
    assert capsys.readouterr().out == "loss of this is small\n"


def test_every_rank_has_its_own_generators_streams_and_main(tmp_path: Path) -> None:
    text = SCRIPT.replace("        optimizer.zero_grad()", DRAWS).replace("print(", "assert drawn == kept; print(")
    simulate(tmp_path, text.replace("torch.manual_seed(1)", SEEDS), num_ranks=3)


SEEDS = """
import os, random, numpy as np
rank, kept = int(os.environ["RANK"]), []
drawn = []
random.seed(rank); np.random.seed(rank)
expected = random.Random(rank)
torch.manual_seed(1)
"""
DRAWS = """
        optimizer.zero_grad()
        drawn.append(random.random()); kept.append(expected.random())
        assert sys.modules["__main__"].rank == rank == int(os.environ["RANK"])
"""


def test_the_process_is_as_it_was(tmp_path: Path) -> None:
    before = sys.argv, list(sys.path), sys.stdout, sys.modules["__main__"], DataLoader.__init__, random.getstate()
    simulate(tmp_path, SCRIPT.replace("torch.manual_seed(1)", "import random; random.seed(5)"))
    after = sys.argv, list(sys.path), sys.stdout, sys.modules["__main__"], DataLoader.__init__, random.getstate()
    assert after == before


def test_loaders_fetch_in_the_rank_itself(tmp_path: Path) -> None:
    with use_script_process(tmp_path / "train.py", []):
        loader = DataLoader(TensorDataset(torch.arange(4)), 2, num_workers=2, persistent_workers=True, timeout=3)
        assert (loader.num_workers, loader.persistent_workers, loader.timeout) == (0, False, 0)
        assert [batch[0].tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_an_error_of_the_script_is_told_with_its_line(tmp_path: Path) -> None:
    text = SCRIPT.replace("        optimizer.zero_grad()", "        if weft_rank == 1: raise ValueError('seven')")
    with pytest.raises(RankFailedError, match="rank 1 of 2: ValueError: seven") as failed:
        simulate(tmp_path, text.replace("torch.manual_seed(1)", "import os\nweft_rank = int(os.environ['RANK'])"))
    assert "train.py" in failed.value.shown and "weft/simulation" not in failed.value.shown


@pytest.mark.parametrize(("text", "error"), [(HEAD + LOOP, "never wove"), ("import sys; sys.exit('no')", "exit code")])
def test_a_script_without_ranks_is_refused(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        simulate(tmp_path, text)


def test_sys_exit_is_a_good_end(tmp_path: Path) -> None:
    assert simulate(tmp_path, SCRIPT + "sys.exit(0)").num_steps == 6


def test_numpy_of_one_rank_is_not_that_of_another() -> None:
    def draw(group: object) -> list[float]:
        numbers = []
        for _ in range(3):
            numbers.append(np.random.random())
            group.clock.charge(1.0)  # type: ignore[attr-defined]
        return numbers

    state: AbstractProcessState = ScriptState()
    first, second = run_virtual(draw, 2, state=state).results
    assert first == second and len(set(first)) == 3
