"""Activations in a wire format, in trainings: bytes as planned, streams, scripts, checkpoints, values that overflow."""

from functools import partial
from pathlib import Path

import pytest

from tests.command_line import run_weft
from tests.distributed.placement.pipeline.cases import SCHEDULES
from tests.distributed.placement.proofs import small_net
from tests.distributed.script.test_pipeline_script import train
from tests.distributed.script.virtual_script import run_script
from tests.proving.test_rounded import small_gpt
from tests.simulation.test_simulation import run as simulate
from tests.simulation.test_simulation import tiny
from weft.distributed.codecs.activations import wire_format
from weft.errors import PlanError, TrainingError
from weft.planning.activation_cost import activation_bytes
from weft.planning.placement_cost import pipeline_cost, tensor_cost
from weft.proving.plan_proof import prove
from weft.records.record import RunRecord
from weft.records.record_file import read_record
from weft.specs import parse_plan
from weft.specs.axes import AXES
from weft.training.recipe import Recipe

NAMES = tuple(AXES["activations"])
BATCH, WIDTH, CLASSES = 64, 64, 10  # of `short`


def short(plan: str, **settings: object) -> Recipe:
    """An MLP, some steps of it."""
    return tiny(plan, **{"model__hidden": "64,64,64,64,64", **settings})


def record_of(path: Path, recipe: Recipe) -> RunRecord:
    return simulate(path, recipe, compute=0.01).record


def value_of(record: RunRecord, name: str) -> float:
    return record.repetitions[0].values[name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("schedule", ["gpipe(4)", "zero_bubble(4)"])
def test_a_stage_sends_the_bytes_of_the_formula(tmp_path: Path, name: str, schedule: str) -> None:
    """Rank 0, whose value goes out."""
    record = record_of(tmp_path / "run", short(f"pipeline=2 schedule={schedule} activations={name}"))
    planned = pipeline_cost(4, 0.0, 4.0 * BATCH / 4 * WIDTH, activations=name)
    assert value_of(record, "activation_bytes") == planned.bytes_sent


@pytest.mark.parametrize("name", NAMES)
def test_split_layers_send_the_bytes_of_the_formula(tmp_path: Path, name: str) -> None:
    """Three pairs of layers: the first has no gradient to send, and the last gives scores of few classes. Of two ranks
    an all-reduce sends each message once."""
    record = record_of(tmp_path / "run", short(f"tensor=2 activations={name}"))
    inner = tensor_cost(2, 4.0 * BATCH * WIDTH, num_pairs=2, activations=name).bytes_sent
    scores = tensor_cost(2, 4.0 * BATCH * CLASSES, activations=name).bytes_sent / 2
    assert value_of(record, "activation_bytes") == inner + scores


def test_simulated_links_carry_fewer_bytes(tmp_path: Path) -> None:
    found = {}
    for name in NAMES:
        result = simulate(tmp_path / name, short(f"pipeline=2 activations={name}"), compute=0.01)
        found[name] = result.num_bytes
    assert found["tree8"] == found["linear8"] < found["bf16"] == found["fp16"] < found["none"]


@pytest.mark.parametrize("schedule", [*SCHEDULES, "pipedream", "pipedream(vertical)"])
def test_every_schedule_trains(tmp_path: Path, schedule: str) -> None:
    plan = f"pipeline=2 schedule={schedule}"
    losses = {
        name: value_of(record_of(tmp_path / name, short(f"{plan} activations={name}")), "test/loss")
        for name in ("none", "tree8")
    }
    assert losses["tree8"] != losses["none"] and losses["tree8"] == pytest.approx(losses["none"], rel=0.02)


@pytest.mark.parametrize("plan", ["data=2 tensor=2 consistency=local(2)", "data=2 pipeline=2 topology=server"])
def test_replicas_may_agree_as_they_like(tmp_path: Path, plan: str) -> None:
    record = record_of(tmp_path / "run", short(f"{plan} activations=linear8"))
    assert value_of(record, "activation_bytes") > 0 and value_of(record, "test/loss") < 5


def test_a_script_in_stages_takes_a_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_format, "LEAST", 1)  # its values have few numbers
    exact, plan = train("data", epochs=1), "pipeline=2 schedule=1f1b(2) activations=tree8"
    first, second = run_script(partial(train, plan, epochs=1), 2, plan)
    assert first["losses"] == second["losses"] != exact["losses"]
    assert first["losses"] == pytest.approx(exact["losses"], rel=0.05)


def test_a_value_that_overflows_ends_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp16 as in no format: what is not finite arrives as such, and is named by the loop."""
    monkeypatch.setattr(wire_format.HalfFormat, "encode", lambda self, x: (1e9 * x.reshape(-1)).to(self._dtype))
    with pytest.raises(TrainingError):
        record_of(tmp_path / "run", short("pipeline=2 activations=fp16"))


@pytest.mark.parametrize("plan", ["data=2", "shard=2", "expert=2", "linear=2", ""])
def test_a_plan_that_sends_no_activations_has_no_format_for_them(plan: str) -> None:
    with pytest.raises(PlanError, match=r"activations travel between stages.*; nearest: "):
        parse_plan(f"{plan} activations=tree8")


def test_the_format_is_part_of_the_plans_text() -> None:
    plan = parse_plan("pipeline=2 activations=tree8")
    assert str(plan) == "data=1 pipeline=2 activations=tree8" and parse_plan(str(plan)) == plan
    assert str(parse_plan("pipeline=2 activations=none")) == "data=1 pipeline=2"
    with pytest.raises(PlanError, match="tree8"):
        parse_plan("pipeline=2 activations=tree")


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", ["pipeline=2 activations=tree8", "tensor=3 activations=linear8", "tensor=2 activations=bf16"]
)
def test_plans_are_proved_on_processes(plan: str) -> None:
    proof = prove(small_gpt(model__width=24, model__num_heads=6), plan, num_steps=3)
    assert proof.passed and proof.finding.endswith("to the last bit"), proof.finding


@pytest.mark.slow
def test_a_run_ends_in_the_bits_of_the_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [
        "--set",
        "model.hidden=64,64",
        "--set",
        "epochs=0.5",
        "--set",
        "schedule=constant",
        "--plan",
        "pipeline=2 activations=tree8",
    ]
    run_weft(capsys, "run", "digits_mlp", *settings, "--out", tmp_path / "run")
    run_weft(capsys, "simulate", "digits_mlp", *settings, "--out", tmp_path / "simulated")
    found, simulated = (read_record(tmp_path / name).repetitions[0] for name in ("run", "simulated"))
    assert found.hashes == simulated.hashes
    assert found.values["activation_bytes"] == simulated.values["activation_bytes"] > 0


def test_rows_of_pictures_are_fewer_bytes(tmp_path: Path) -> None:
    net = small_net("lenet", **{"rules.*": "space", "epochs": 0.2})
    sent = {
        name: value_of(
            record_of(tmp_path / name, net.with_setting("plan", f"tensor=2 activations={name}")), "activation_bytes"
        )
        for name in ("none", "bf16", "tree8")
    }
    assert sent["bf16"] == pytest.approx(sent["none"] / 2) and sent["tree8"] == pytest.approx(
        sent["none"] / 4, rel=0.02
    )
    assert activation_bytes("tree8", 4.0 * 10**6) == pytest.approx(10**6, rel=0.01)
