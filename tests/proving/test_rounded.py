"""The proof of rounded activations: passes for every schedule and split, and catches planted faults."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.placement.pipeline.cases import SCHEDULES
from tests.distributed.placement.proofs import small_net
from tests.distributed.virtual_plan import run_plan
from tests.proving.test_lockstep import case_of, small_mlp, with_settings
from weft.distributed.codecs.activations import CodedGroup, coded_group, eight_bit
from weft.distributed.group.calls import AllGather, AllReduce
from weft.distributed.placement.pipeline.transport import Transport
from weft.distributed.realise import RunSpec
from weft.errors import UsageError
from weft.proving.method import Case, Evidence
from weft.proving.plan_proof import method_of
from weft.proving.proof import Proof
from weft.proving.rounded import Rounded, gradient_bound, step_of
from weft.recipes import pydoc_gpt
from weft.specs import parse_plan
from weft.training.recipe import Recipe

FORMATS = ("fp16", "bf16", "linear8", "tree8")


def small_gpt(**settings: object) -> Recipe:
    """Large enough that values between stages are encoded; with Adam, clipping and tied weights."""
    base = {"model__width": 16, "model__num_layers": 2, "model__num_heads": 2, "batch_size": 8}
    return with_settings(pydoc_gpt(), **{**base, **settings})


Found = dict[str, Tensor]
"""Left by one rank."""


def traces_of(case: Case) -> list[Found]:
    spec = RunSpec.of(case.recipe, (0,))
    return list(run_plan(case.plan, lambda _group, replicas: Rounded().trace(case, replicas), spec=spec).results)


def judge(case: Case, ranks: list[Found]) -> Proof:
    return Rounded().judge(case, [Evidence(ranks, Path())])


def prove(recipe: Recipe, plan: str, num_steps: int = 2) -> Proof:
    case = case_of(recipe, plan, num_steps)
    return judge(case, traces_of(case))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("degrees", ["pipeline=2 schedule=1f1b(2)", "tensor=2"])
def test_gradients_are_off_by_rounding_and_updates_are_not(name: str, degrees: str) -> None:
    proof = prove(small_gpt(), f"{degrees} activations={name}")
    assert proof.passed and proof.finding.endswith("to the last bit"), proof.finding
    assert 1e-6 < proof.largest_error < 2 * step_of(parse_plan(f"tensor=2 activations={name}"))
    assert proof.tolerance == gradient_bound(parse_plan(f"tensor=2 activations={name}"))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(schedule: str) -> None:
    proof = prove(
        small_gpt(model__num_layers=4, model__dropout=0.1), f"data=2 pipeline=2 schedule={schedule} activations=tree8"
    )
    assert proof.passed, proof.finding


@pytest.mark.parametrize("degrees", ["tensor=3", "pipeline=2 tensor=2", "pipeline=2 tensor=1:2", "shard=2 tensor=2"])
def test_products_of_splits(degrees: str) -> None:
    recipe = small_gpt(model__width=24, model__num_heads=6, model__num_layers=3)
    if "1:2" in degrees:  # tied weights cannot be split in different ways
        recipe = small_mlp(**{"model.hidden": "32,32,32"})
    proof = prove(recipe, f"{degrees} activations=linear8")
    assert proof.passed, proof.finding


def test_parts_of_sequences() -> None:
    proof = prove(small_gpt(**{"rules.blocks": "sequence"}), "tensor=2 activations=tree8")
    assert proof.passed, proof.finding


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_pictures_through_layers_with_kinks(name: str) -> None:
    """ReLU: errors are of the order of the root of those of one number."""
    net = small_net("resnet", **{"rules.*": "space", "model.depth": 8, "model.width": 2})
    plan = f"tensor=2 activations={name}"
    proof = prove(net, plan)
    assert proof.passed and proof.largest_error > 4 * step_of(case_of(net, plan, 1).plan), proof.finding


def test_exact_ranks_would_pass_as_well() -> None:
    """The bound is for errors; where there are none, the proof has nothing to say against it."""
    case = case_of(small_gpt(), "pipeline=2 activations=tree8", 2)
    exact = case_of(small_gpt(), "pipeline=2", 2)
    proof = judge(case, traces_of(exact))
    assert proof.passed and proof.largest_error < 1e-5


# ---- the method of a plan


def test_a_plan_with_rounded_activations_is_proved_by_this_method() -> None:
    assert isinstance(method_of(parse_plan("pipeline=2 activations=bf16")), Rounded)
    assert not isinstance(method_of(parse_plan("pipeline=2")), Rounded)


@pytest.mark.parametrize(
    "plan",
    [
        "pipeline=2 schedule=pipedream activations=bf16",
        "data=2 tensor=2 consistency=local activations=bf16",
        "data=2 tensor=2 topology=server activations=bf16",
        "data=2 tensor=2 compress=bf16 activations=bf16",
        "data=2 tensor=2 share=measured activations=bf16",
    ],
)
def test_what_has_no_gradient_to_compare_with_is_refused(plan: str) -> None:
    with pytest.raises(UsageError, match="rounded activations are proved of synchronous ranks"):
        method_of(parse_plan(plan))


# ---- planted faults


def forget_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    real = eight_bit.decode

    def decode(message: Tensor, num_elements: int, kind: Any) -> Tensor:
        plain = message.clone()
        plain[: message.numel() - num_elements] = torch.ones(-(-num_elements // 2048)).view(torch.uint8)
        return real(plain, num_elements, kind)

    monkeypatch.setattr(eight_bit, "decode", decode)


@pytest.mark.parametrize("degrees", ["pipeline=2", "tensor=2"])
def test_a_decode_that_forgets_the_scale_is_found(monkeypatch: pytest.MonkeyPatch, degrees: str) -> None:
    forget_scale(monkeypatch)
    proof = prove(small_gpt(), f"{degrees} activations=tree8")
    assert not proof.passed and "of its norm" in proof.finding


def test_a_rank_that_keeps_its_own_exact_part_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_own(wire_format: Any, tensor: Tensor, rank: int, size: int) -> Any:
        message = wire_format.encode(tensor)
        everyone = message.new_empty((size, message.numel()))
        yield AllGather(everyone, message.unsqueeze(0))
        return tensor.add_(wire_format.decode(everyone[1 - rank], tensor.numel(), tensor.dtype).view_as(tensor))

    monkeypatch.setattr(coded_group, "_gather_sum", keep_own)
    proof = prove(small_gpt(), "tensor=2 activations=tree8")
    assert not proof.passed and "replicas differ" in proof.finding


def test_gradients_that_are_not_added_up_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CodedGroup, "start", lambda self, call: coded_group._CodedWork(self._inner, _nothing(call)))
    proof = prove(small_gpt(), "tensor=2 activations=tree8")
    assert not proof.passed


def _nothing(call: Any) -> Any:
    yield AllReduce(torch.zeros(1))
    return call.tensor


def test_gradients_of_other_samples_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Transport.send_gradient

    def send(self: Transport, edge: Any, gradient: Tensor) -> None:
        real(self, edge, gradient.roll(1, 0))

    monkeypatch.setattr(Transport, "send_gradient", send)
    assert not prove(small_gpt(), "pipeline=2 schedule=1f1b(2) activations=linear8").passed


@pytest.mark.parametrize("entry", ["tokens.weight", "tokens.weight (first_moment)", "tokens.weight (gradient)", "loss"])
def test_a_trace_that_is_off_anywhere_is_found(entry: str) -> None:
    case = case_of(small_gpt(), "pipeline=2 activations=bf16", 2)
    traces = traces_of(case)
    assert judge(case, traces).passed
    for step in range(2):
        spoilt = [{**found, f"{step}/{entry}": found[f"{step}/{entry}"] * 1.05} for found in traces]
        assert not judge(case, spoilt).passed


@pytest.mark.parametrize("prefix", ["1/", "own/2/"])
def test_a_rank_that_is_off_in_one_bit_is_found(prefix: str) -> None:
    case = case_of(small_gpt(), "tensor=2 activations=bf16", 2)
    traces = traces_of(case)
    key = f"{prefix}blocks.0.norm1.weight"
    traces[1][key] = torch.nextafter(traces[1][key], torch.tensor(9.0))
    assert "norm1.weight of rank 1 is not that of rank 0" in judge(case, traces).finding


def test_what_is_not_finite_proves_nothing() -> None:
    case = replace(case_of(small_gpt(), "pipeline=2 activations=bf16", 1), tolerance=1e9)
    traces = traces_of(case)
    for found in traces:
        found["0/tokens.weight (gradient)"][0, 0] = torch.nan
    assert not judge(case, traces).passed
