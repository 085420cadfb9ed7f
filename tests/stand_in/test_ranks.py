"""Real ranks on the stand-in accelerator: every scheme, checkpoints, `weave`, and a group that stages."""

from pathlib import Path
from typing import Any

import pytest

from tests.processes.ranks import run_processes

PLANS = [
    "data=2",
    "data=2 topology=ring",
    "data=2 topology=server(2)",
    "data=2 consistency=local(2,outer=nesterov)",
    "data=2 consistency=elastic(2)",
    "data=2 consistency=gossip(ring)",
    "data=2 consistency=gossip(ring,mix=pair)",
    "data=2 consistency=elastic(2) topology=server",
    "data=2 consistency=async topology=server(2)",
    "data=2 consistency=stale(1) topology=server",
    "data=2 consistency=backup(1) topology=server",
    "shard=2",
    "shard=2 compress=bf16",
    "data=2 topology=ring compress=fp16",
    "data=2 consistency=local(2) compress=bf16",
    "data=2 consistency=gossip(ring,mix=pair) compress=bf16",
    "data=2 consistency=async topology=server(2) compress=bf16",
]


@pytest.mark.slow
def test_every_scheme_has_the_bits_of_the_cpu(tmp_path: Path) -> None:
    found: dict[str, Any] = run_processes(
        "tests.stand_in.programs:train_plans", 2, plans=PLANS, folder=str(tmp_path), deadline=120
    )[0]
    assert list(found) == PLANS
    for plan, (cpu, stand_in) in found.items():
        assert stand_in == cpu, plan


@pytest.mark.slow
def test_a_run_that_was_interrupted_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    plans = ["data=2", "shard=2", "data=2 consistency=local(2,outer=nesterov)", "data=2 consistency=elastic(2)"]
    found: dict[str, Any] = run_processes(
        "tests.stand_in.programs:save_and_resume", 2, plans=plans, folder=str(tmp_path), deadline=120
    )[0]
    assert list(found) == plans
    for plan, (whole, resumed) in found.items():
        assert resumed == whole, plan


@pytest.mark.slow
def test_a_woven_model_trains_on_the_device_that_it_is_on() -> None:
    plans = ["data", "data topology=ring", "shard", "data compress=bf16"]
    results = run_processes("tests.stand_in.programs:weave_scripts", 2, plans=plans)
    for found in results:
        assert found[0::2] == found[1::2] and len(found) == 2 * len(plans)  # on the CPU, and on the stand-in
    assert results[0] == results[1]


@pytest.mark.slow
def test_a_script_saves_and_goes_on_on_the_device_that_it_is_on(tmp_path: Path) -> None:
    plans = ["data", "shard", "data consistency=local(3)", "data consistency=elastic(2)"]
    results = run_processes("tests.stand_in.programs:save_scripts", 2, plans=plans, folder=str(tmp_path))
    assert results[0] == results[1]  # what all stand for
    for after_saving, after_loading in results[0]:
        assert after_saving == after_loading


@pytest.mark.slow
def test_a_group_that_stages_keeps_the_contract() -> None:
    reports = run_processes("tests.stand_in.programs:keep_contract", 2)
    for number in range(4):  # over shared memory, and three virtual ranks
        assert [problem for rank in reports for problem in rank[number]["problems"]] == []
    assert len({rank[0]["digest"] for rank in reports}) == 1
    assert len({report["digest"] for report in reports[0][1:]}) == 1


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one rank did, on the CPU and on the stand-in."""
    folder = tmp_path_factory.mktemp("alone")
    found: dict[str, Any] = run_processes("tests.stand_in.programs:be_alone", 1, deadline=120, folder=str(folder))[0]
    return found


@pytest.mark.slow
def test_the_stand_in_is_found_and_shared(alone: dict[str, Any]) -> None:
    assert alone["devices"] == ["standin:0", "standin:0", ["cpu", "standin:0"]]
    stray, unknown = alone["refused"]
    assert "WrongSideError" in stray and "aten.add.Tensor met a CPU tensor" in stray
    assert "UsageError: no such device (device: standin:1, here: cpu, standin:0)" in unknown


@pytest.mark.slow
def test_a_whole_run_measures_on_the_device(alone: dict[str, Any]) -> None:
    cpu, stand_in = alone["whole"]
    assert all(stand_in[key] == cpu[key] for key in ("hashes", "losses", "values"))
    assert stand_in["share_of_peak"] > 0
    # Dropout is made of other operators on other devices, and keeps other masks.
    assert stand_in["peak_tensor_memory"] == pytest.approx(cpu["peak_tensor_memory"], rel=0.1)
    assert (cpu["device"], stand_in["device"]) == ("cpu", "standin:0")
    assert cpu["num_synchronised"] == 0 and stand_in["num_synchronised"] >= stand_in["num_steps"] > 0


@pytest.mark.slow
def test_every_optimizer_and_its_checkpoint_have_the_bits_of_the_cpu(alone: dict[str, Any]) -> None:
    for name, (cpu, stand_in) in alone["optimizers"].items():
        assert stand_in == cpu, name


@pytest.mark.slow
def test_virtual_ranks_share_the_device(alone: dict[str, Any]) -> None:
    for plan, (cpu, stand_in) in alone["simulated"].items():
        assert stand_in == cpu, plan


@pytest.mark.slow
def test_a_run_goes_on_on_another_device(alone: dict[str, Any]) -> None:
    whole, moved = alone["moved"]
    assert moved == whole
