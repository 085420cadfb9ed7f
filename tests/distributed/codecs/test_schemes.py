"""Every scheme with every codec, on virtual ranks: held to its equations, replayed, and half of the bytes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.virtual_plan import run_plan
from tests.proving.test_lockstep import case_of, small_mlp
from weft.distributed.codecs import half
from weft.distributed.group import AbstractGroup
from weft.distributed.realise import RunSpec
from weft.proving.method import Case, Evidence
from weft.proving.own_pace import train_to_the_end
from weft.proving.plan_proof import method_of
from weft.proving.proof import Proof
from weft.specs import parse_plan
from weft.torch_private import use_determinism
from weft.training.history import History
from weft.training.replicas import AbstractReplicas

# Sums of the direct all-reduce follow the order of ranks and are rounded once, as those of native groups are.
PLANS = [
    "data=3 topology=direct",
    "data=3 topology=server(2)",
    "data=3 consistency=backup(1) topology=server",
    "data=3 consistency=stale(1) topology=server(2)",
    "data=3 consistency=stale(2,commit=arrival) topology=server",
    "data=3 consistency=async topology=server(2)",
    "data=3 consistency=async(push=difference) topology=server",
    "data=2 consistency=async(parts=2) topology=server(2)",
    "data=4 consistency=async topology=server(2,inner=2)",
    "data=3 consistency=local(2) topology=direct",
    "data=3 consistency=local(2,outer=nesterov,state=mean) topology=direct",
    "data=2 consistency=local(2,after=2) topology=direct",
    "data=3 consistency=elastic(2)",
    "data=3 consistency=elastic(2) topology=server(2)",
    "data=4 consistency=gossip(ring)",
    "data=3 consistency=gossip(complete,mix=after)",
    "data=4 consistency=gossip(ring,mix=pair)",
    "data=4 consistency=gossip(ring,lost=drop)",
]


@pytest.fixture(autouse=True)
def determinism() -> Iterator[None]:
    with use_determinism():
        yield


def run_case(
    case: Case, work: Callable[[AbstractReplicas], Any], folder: Path, replay: Path | None = None
) -> list[Any]:
    """The results of all ranks of the case's plan; servers and responders record in the folder."""
    folder.mkdir()
    spec = RunSpec.of(case.recipe, (case.seed,), run=folder, replay=replay)

    def on_rank(_group: AbstractGroup, replicas: AbstractReplicas) -> Any:
        return work(replicas)

    return list(run_plan(case.plan, on_rank, spec=spec).results[: case.plan.num_ranks])


def prove(plan: str, folder: Path) -> Proof:
    """As `weft prove` does, on virtual ranks."""
    chosen = parse_plan(plan)
    method = method_of(chosen)
    case = case_of(small_mlp(), plan, method.steps_needed(chosen, 3))
    runs: list[Evidence] = []
    for number in range(method.num_runs):
        run = folder / f"run-{number}"
        ranks = run_case(case, lambda replicas: method.trace(case, replicas), run, runs[0].folder if runs else None)
        runs.append(Evidence(ranks, run))
    return method.judge(case, runs)


@pytest.mark.parametrize("codec", ["bf16", pytest.param("fp16", marks=pytest.mark.long)])
@pytest.mark.parametrize("plan", PLANS)
def test_ranks_follow_their_equations(plan: str, codec: str, tmp_path: Path) -> None:
    proof = prove(f"{plan} compress={codec}", tmp_path)
    assert proof.passed, proof.finding
    assert proof.largest_error < 1e-6


@pytest.mark.parametrize("plan", PLANS)
def test_a_codec_that_truncates_is_found(plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def truncate(
        codec: half.HalfCodec, bucket: Any, message: Tensor, out: Tensor | None = None, **options: float
    ) -> Tensor:
        bits = (message.detach() * options.get("scale", 1.0)).contiguous().view(torch.int32) & ~0xFFFF
        sent = bits.view(torch.float32).to(torch.bfloat16)
        return sent if out is None else out.view(message.shape).copy_(sent)

    monkeypatch.setattr(half.HalfCodec, "encode", truncate)
    proof = prove(f"{plan} compress=bf16", tmp_path)
    assert not proof.passed


def count_bytes(plan: str, folder: Path) -> int:
    """What all ranks handed to their transports, in so many steps."""
    case = case_of(small_mlp(), plan, 8)

    def work(replicas: AbstractReplicas) -> int:
        history = History()
        train_to_the_end(case, replicas, emit=history)
        return sum(traffic.num_bytes for traffic in history.step_traffic)

    return sum(run_case(case, work, folder))


@pytest.mark.parametrize("plan", [plan for plan in PLANS if "state=mean" not in plan])
def test_half_of_the_bytes_are_sent(plan: str, tmp_path: Path) -> None:
    whole, halved = (count_bytes(f"{plan} compress={codec}", tmp_path / codec) for codec in ("none", "bf16"))
    assert whole > 0
    # Whom a rank finds to pair with hangs on the time that messages take.
    assert halved * 2 == (pytest.approx(whole, rel=0.2) if "pair" in plan else whole)


def test_hops_that_round_are_within_the_stated_tolerance(tmp_path: Path) -> None:
    proof = prove("data=4 topology=ring compress=bf16", tmp_path)
    assert proof.passed and not proof.is_bitwise
    assert proof.tolerance == 4 * 4 * 2**-8
