"""Codecs on real processes: the bits of the equations over shared memory, and half of the bytes in a run's record."""

from pathlib import Path

import pytest

from tests.command_line import run_weft
from tests.proving.test_lockstep import small_mlp
from weft.proving.plan_proof import prove
from weft.records.record_file import read_record


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "data=2 compress=bf16",
        "data=3 compress=fp16",
        "data=2 topology=server(2) compress=bf16",
        "data=2 consistency=async topology=server compress=fp16",
        "data=2 consistency=local(2) compress=bf16",
    ],
)
def test_native_plans_are_proved_to_the_last_bit(plan: str) -> None:
    proof = prove(small_mlp(), plan, num_steps=3)
    assert proof.passed and proof.is_bitwise, proof.finding


@pytest.mark.slow
def test_a_run_sends_half_of_the_bytes_and_meets_its_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_weft(capsys, "run", "digits_mlp", "--plan", "data=2 compress=bf16", "--out", tmp_path / "bf16")
    record = read_record(tmp_path / "bf16")
    num_parameters = 64 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10
    assert record.repetitions[0].values["bytes_per_step"] == 2 * num_parameters
    assert all(verdict.passed for verdict in record.verdicts)
