"""The placement of `tensor` in the loop of every plan: steps, clipping, parts of checkpoints, losses, refusals."""

import pytest
import torch
from torch import Tensor

from tests.distributed.placement.tensor.cases import TOKENS
from tests.proving.test_lockstep import case_of, small_mlp
from weft.distributed.channels.all_reduce import replicas_in
from weft.distributed.group import AbstractGroup
from weft.distributed.placement import MeshGroups
from weft.distributed.placement.tensor import TensorParallel
from weft.distributed.virtual import run_virtual
from weft.errors import PlanError
from weft.proving.lockstep import compare_ranks, trace_ranks, trace_references
from weft.proving.proof import Proof
from weft.specs import parse_plan
from weft.training.build import build_task
from weft.training.evaluation import evaluate
from weft.training.gradients import joint_norm
from weft.training.models import char_gpt
from weft.training.placement import WholeModel
from weft.training.recipe import Recipe
from weft.training.replicas import SoloReplicas


def prove(recipe: Recipe, plan: str, num_steps: int = 4) -> Proof:
    case, chosen = case_of(recipe, plan, num_steps), parse_plan(plan)

    def program(group: AbstractGroup) -> list[dict[str, Tensor]]:
        return trace_ranks(case, replicas_in(MeshGroups(group, chosen.mesh(group.rank)), chosen))

    traces = list(run_virtual(program, chosen.num_ranks).results)
    references = trace_references(case)
    of_ranks = [references[chosen.mesh(rank).replica] for rank in range(chosen.num_ranks)]
    return compare_ranks(traces, of_ranks, case)


@pytest.mark.parametrize("plan", ["tensor=2", "tensor=3", "data=2 tensor=2"])
def test_ranks_train_as_one_does(plan: str) -> None:
    proof = prove(small_mlp(**{"clip_norm": 0.05, "model.dropout": 0.3}), plan)
    assert proof.passed, proof.finding


def test_a_norm_of_one_part_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorParallel, "norm", lambda self, norms: joint_norm(norms))
    assert not prove(small_mlp(clip_norm=0.05), "tensor=2").passed


def test_evaluation_counts_every_sample_once() -> None:
    case, plan = case_of(small_mlp(), "data=2 tensor=2", 1), parse_plan("data=2 tensor=2")

    def program(group: AbstractGroup) -> dict[str, float]:
        replicas = replicas_in(MeshGroups(group, plan.mesh(group.rank)), plan)
        task, state = build_task(case.recipe, case.splits, 0, replicas)
        return evaluate(task.executor, state.model, case.splits.test, ("accuracy",), replicas)

    task, state = build_task(case.recipe, case.splits, 0, SoloReplicas())
    expected = evaluate(task.executor, state.model, case.splits.test, ("accuracy",))
    for found in run_virtual(program, 4).results:
        assert found == pytest.approx(expected)


def test_parts_of_queries_keys_and_values_lie_side_by_side() -> None:
    def program(group: AbstractGroup) -> tuple[Tensor, Tensor, bool]:
        torch.manual_seed(0)
        model = char_gpt(TOKENS, width=24, num_heads=6)
        weight = model.get_parameter("blocks.0.attention.qkv.weight")
        before = weight.detach().clone()
        placement = TensorParallel(group, group, WholeModel())
        placement.place(model)
        name = "parameter/blocks.0.attention.qkv.weight"
        assert weight is model.get_parameter("blocks.0.attention.qkv.weight")  # optimizers know it
        assert torch.equal(weight[12:24], before[24 + 12 * group.rank :][:12])  # of its keys
        assert placement.cut_of(f"slot/{name.removeprefix('parameter/')}/velocity") == placement.cut_of(name)
        return before, placement.whole({name: weight})[name], placement.has_loss

    results = list(run_virtual(program, 2).results)
    assert [has_loss for _, _, has_loss in results] == [True, False]
    assert all(torch.equal(before, whole) for before, whole, _ in results)


def test_a_captured_graph_is_refused() -> None:
    with pytest.raises(PlanError, match=r"executor: GraphExecutor, plan: tensor\); use executor=eager"):
        prove(small_mlp(executor="graph"), "tensor=2")


def test_rules_of_layers_scale_by_the_norms_of_whole_tensors() -> None:
    proof = prove(small_mlp(optimizer="lars"), "tensor=2")
    assert proof.passed, proof.finding


def test_norms_of_parts_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorParallel, "whole_norms", lambda self, norms: norms)
    assert not prove(small_mlp(optimizer="lars"), "tensor=2").passed
