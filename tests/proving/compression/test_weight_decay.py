"""Weight decay beside dgc: its momentum is not sent, and the proof knows it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.codecs.test_schemes import run_case
from tests.proving.test_lockstep import case_of, small_mlp, with_settings
from weft.distributed.placement import data_parallel
from weft.proving.method import Evidence
from weft.proving.plan_proof import method_of
from weft.proving.proof import Proof
from weft.specs import parse_plan
from weft.torch_private import use_determinism
from weft.training.optimizers import SGD, AbstractOptimizer, Optimizer, WithoutMomentum, split_momentum

DECAY = 0.1


@pytest.fixture(autouse=True)
def determinism() -> Iterator[None]:
    with use_determinism():
        yield


def prove(plan: str, optimizer: str, folder: Path) -> Proof:
    recipe = with_settings(small_mlp(), optimizer=optimizer, optimizer__lr=0.1, optimizer__weight_decay=DECAY)
    method = method_of(parse_plan(plan))
    case = case_of(recipe, plan, method.steps_needed(parse_plan(plan), 5))
    ranks = run_case(case, lambda replicas: method.trace(case, replicas), folder / "run", None)
    return method.judge(case, [Evidence(ranks, folder / "run")])


@pytest.mark.parametrize("optimizer", ["momentum", "nesterov"])
@pytest.mark.parametrize("plan", ["data=2 topology=direct", "shard=2 topology=direct"])
def test_ranks_follow_the_equations(plan: str, optimizer: str, tmp_path: Path) -> None:
    proof = prove(f"{plan} compress=dgc(0.05,warmup=2)", optimizer, tmp_path)
    assert proof.passed and proof.is_bitwise, proof.finding


def test_decay_without_its_momentum_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(optimizer: AbstractOptimizer) -> WithoutMomentum:
        return split_momentum(optimizer)._replace(optimizer=Optimizer(SGD(DECAY), lr=optimizer.lr))

    monkeypatch.setattr(data_parallel, "split_momentum", plain)
    assert not prove("data=2 topology=direct compress=dgc(0.05,warmup=2)", "momentum", tmp_path).passed
