"""Cuts that a plan asks for: by time, for ranks of unequal speed, in a bounded memory; the same on all ranks."""

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.placement.pipeline.cases import prove, small_mlp
from tests.distributed.placement.proofs import small_net
from tests.proving.test_lockstep import splits_of
from weft.distributed.channels.all_reduce import replicas_in
from weft.distributed.group import AbstractGroup
from weft.distributed.group.clock import VirtualTimes
from weft.distributed.placement import MeshGroups
from weft.distributed.placement.pipeline import partition_units, schedule_of
from weft.distributed.placement.pipeline.cutting import Cutting, kept_by
from weft.distributed.virtual import run_virtual
from weft.errors import PlanError, RunFolderError
from weft.records.run_folder import create_run_folder
from weft.simulation.computation import ComputeModel
from weft.simulation.simulation import Simulation, simulate
from weft.simulation.stragglers import parse_stragglers
from weft.specs import parse_plan
from weft.training.build import build_task
from weft.training.recipe import Recipe

SCHEDULE = "schedule=1f1b(4)"
WIDTH = 64
MLP = small_mlp(**{"model.hidden": ",".join([str(WIDTH)] * 8)})  # 8 equal layers, and one of 10 outputs


def layers_of(recipe: Recipe, plan: str, slow: dict[int, float] | None = None) -> list[int]:
    """How many layers the ranks of each stage get; ranks of a stage must agree."""
    chosen = parse_plan(plan)

    def program(group: AbstractGroup) -> list[str]:
        times = VirtualTimes(None, lambda: group.clock.charge((slow or {}).get(group.rank, 1.0)))
        replicas = replicas_in(MeshGroups(group, chosen.mesh(group.rank)), chosen, times=times)
        task, _ = build_task(recipe.with_setting("plan", plan), splits_of(recipe.fixed.data), 0, replicas)
        return [name for name in task.executor.initial_state().parameters if name.endswith("weight")]

    found: dict[int, list[str]] = {}
    for rank, names in enumerate(run_virtual(program, chosen.num_ranks).results):
        assert found.setdefault(chosen.mesh(rank).coordinate("pipeline"), names) == names
    return [len(found[stage]) for stage in range(chosen.pipeline)]


@pytest.mark.parametrize("cut", ["flops", "parameters", "time"])
def test_a_stage_whose_rank_is_slow_gets_fewer_layers(cut: str) -> None:
    equal = layers_of(MLP, f"pipeline=2 cut={cut} {SCHEDULE}", {1: 3.0})
    measured = layers_of(MLP, f"pipeline=2 cut={cut}(measured) {SCHEDULE}", {1: 3.0})
    assert measured[1] < equal[1] and sum(measured) == sum(equal) == 9


@pytest.mark.parametrize("slow", [0, 2, 5])
def test_all_replicas_cut_alike_whichever_rank_is_slow(slow: int) -> None:
    plan = f"data=2 pipeline=2 tensor=1:2 cut=flops(measured) {SCHEDULE}"  # ranks 0 and 1 are stage 0
    usual, found = layers_of(MLP, plan), layers_of(MLP, plan, {slow: 6.0})
    assert usual[0] < usual[1], "two ranks that split layers are faster than one"
    assert (found[0] < usual[0]) == (slow < 2) and found != usual


def test_chunks_of_a_stage_have_its_speed() -> None:
    plan = "pipeline=2 schedule=interleaved(4,chunks=2) cut=flops({})"
    assert layers_of(MLP, plan.format("equal"), {0: 3.0}) == [4, 5]
    assert layers_of(MLP, plan.format("measured"), {0: 3.0}) == [2, 7]


def test_memory_moves_the_cut_or_is_too_small() -> None:
    plan, slow = f"pipeline=2 {SCHEDULE} cut=flops(measured,memory={{}})", {1: 4.0}
    assert layers_of(MLP, plan.format("inf"), slow) == [7, 2]
    layer = 4 * 4 * (WIDTH * WIDTH + WIDTH)  # bytes of its weights in float32, their gradients and two slots
    micro_batches = 2 * -(-66 // 4) * 2 * WIDTH * 4  # two of 17 samples: the inputs of the layer and of its activation
    assert layers_of(MLP, plan.format((6 * (layer + micro_batches)) / 1e9), slow) == [6, 3]
    assert layers_of(MLP, plan.format((6 * layer + 5 * micro_batches) / 1e9), slow) == [5, 4]
    with pytest.raises(PlanError, match=r"no cut fits the memory of a stage \(stages: 2, bytes: 1e\+03\)"):
        layers_of(MLP, plan.format("1e-6"), slow)


def test_operations_and_parameters_are_dealt_to_stages_in_different_ways() -> None:
    """The model whose checkpoints go from cut to cut in test_checkpoints_of_plans.py."""
    resnet = small_net("resnet", model__depth=8)
    flops, parameters = (layers_of(resnet, f"pipeline=2 cut={cut} {SCHEDULE}") for cut in ("flops", "parameters"))
    assert flops[0] < parameters[0]


def test_activations_count_as_often_as_the_schedule_keeps_them() -> None:
    one, all_at_once = parse_plan("pipeline=3 schedule=1f1b(8)"), parse_plan("pipeline=3 schedule=gpipe(8)")
    assert kept_by(schedule_of(3, one.schedule)) == (3, 2, 1)
    assert kept_by(schedule_of(3, all_at_once.schedule)) == (8, 8, 8)
    chunks = parse_plan("pipeline=2 schedule=interleaved(4,chunks=2)")
    assert len(kept_by(schedule_of(2, chunks.schedule))) == 4


def test_rank_0_alone_measures_and_all_cut_by_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted times: the last layer takes as long as all others together."""
    timed: list[str] = []

    def planted(unit: partition_units.Unit, *_: object) -> float:
        timed.append(unit.name)
        return 5.0 if unit.name == "5" else 1.0

    monkeypatch.setattr(partition_units, "_time", planted)

    def cut_on(group: AbstractGroup) -> list[int]:
        plan = parse_plan("data=2 pipeline=2 cut=time")
        module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        groups = MeshGroups(group, plan.mesh(group.rank))
        found = Cutting(groups, plan)(module, (torch.randn(4, 8),), 2)
        return [len(list(stage.module.parameters())) // 2 for stage in found.stages]

    assert run_virtual(cut_on, 4).results == ([5, 1],) * 4
    assert timed.count("0") == 5, "the repetitions of one rank"


def ready(seconds: dict[int, float]) -> ComputeModel:
    """A pass of the 9 layers, of which each takes so long, or 1 s; backward begins with the last."""
    _, state = build_task(MLP, splits_of(MLP.fixed.data), 0)
    names = list(state.model.parameters)
    times = [seconds.get(number // 2, 1.0) / 2 for number in range(len(names))]  # a weight, a bias
    ends = dict(zip(reversed(names), accumulate(reversed(times)), strict=True))
    return ComputeModel(0.1, 0.0, 0.0, {name: (1 + 2 * end / sum(times)) / 3 for name, end in ends.items()})


def simulated(folder: Path, plan: str, compute: ComputeModel, slow: str | None = None, **options: Any) -> Simulation:
    recipe = MLP.with_setting("plan", plan).with_setting("epochs", "0.2")
    stragglers = parse_stragglers(slow) if slow else ()
    return simulate(recipe, folder=create_run_folder(folder, "run"), compute=compute, stragglers=stragglers, **options)


def test_the_virtual_cluster_cuts_by_what_it_charges_and_by_its_slow_ranks(tmp_path: Path) -> None:
    last_is_slow, even = ready({8: 7.0}), ready({})
    flops = simulated(tmp_path / "a", f"pipeline=2 {SCHEDULE}", last_is_slow)
    time = simulated(tmp_path / "b", f"pipeline=2 cut=time {SCHEDULE}", last_is_slow)
    assert time.virtual_seconds < 0.85 * flops.virtual_seconds
    equal = simulated(tmp_path / "c", f"pipeline=2 cut=time {SCHEDULE}", even, "rank 1 3x slower")
    measured = simulated(tmp_path / "d", f"pipeline=2 cut=time(measured) {SCHEDULE}", even, "rank 1 3x slower")
    assert measured.virtual_seconds < 0.85 * equal.virtual_seconds
    again = simulated(tmp_path / "e", f"pipeline=2 cut=time(measured) {SCHEDULE}", even, "rank 1 3x slower")
    assert again.virtual_seconds == measured.virtual_seconds


@pytest.mark.parametrize("cut", ["parameters", "time", "time(stages=measured)", "flops(memory=1)"])
def test_whatever_the_cut_stages_are_those_of_one_rank(cut: str) -> None:
    proof = prove(MLP, f"data=2 pipeline=2 cut={cut} {SCHEDULE}", dtype=torch.float64)
    assert proof.passed, proof.finding


def layers_noted(folder: Path) -> list[list[str]]:
    head = (folder / "decisions" / "seed-0" / "stages.jsonl").read_text().splitlines()[0]
    found: list[list[str]] = json.loads(head)["layers"]
    return found


def test_a_run_notes_its_stages_and_is_repeated_with_them(tmp_path: Path) -> None:
    """Whichever ranks are slow now."""
    plan = f"pipeline=2 cut=time(measured) {SCHEDULE}"
    first = simulated(tmp_path / "a", plan, ready({}), "rank 1 3x slower")
    noted = layers_noted(tmp_path / "a")
    assert len(noted[0]) > len(noted[1]) and len({*noted[0], *noted[1]}) == 9
    other = simulated(tmp_path / "b", plan, ready({}), "rank 0 3x slower")
    assert len(layers_noted(tmp_path / "b")[0]) < len(noted[0])
    again = simulated(tmp_path / "c", plan, ready({}), "rank 0 3x slower", replay=tmp_path / "a")
    assert layers_noted(tmp_path / "c") == noted and again.virtual_seconds > other.virtual_seconds
    assert again.record.repetitions[0].hashes == first.record.repetitions[0].hashes


def test_a_cut_of_another_model_is_not_repeated(tmp_path: Path) -> None:
    plan = f"pipeline=2 cut=time {SCHEDULE}"
    simulated(tmp_path / "a", plan, ready({}))
    path = tmp_path / "a" / "decisions" / "seed-0" / "stages.jsonl"
    path.write_text(path.read_text().rpartition("[")[0] + '["stages",0,99]\n')
    with pytest.raises(PlanError, match=r"model was not cut at these places \(first units: \[0, 99\]"):
        simulated(tmp_path / "b", plan, ready({}), replay=tmp_path / "a")
    path.unlink()
    with pytest.raises(RunFolderError, match="no record of where its model was cut"):
        simulated(tmp_path / "c", plan, ready({}), replay=tmp_path / "a")
    simulated(tmp_path / "d", f"pipeline=2 {SCHEDULE}", ready({}), replay=tmp_path / "a")  # the same every time
