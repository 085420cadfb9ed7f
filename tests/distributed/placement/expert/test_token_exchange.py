"""Tokens that travel: whose they are, in which order, how many bytes; and the proof on real processes."""

import torch
from torch import Tensor

from tests.distributed.placement.expert.cases import small_moe
from weft.distributed.group import AbstractGroup, RecordingGroup
from weft.distributed.placement.expert import ExpertParallel
from weft.distributed.placement.expert.all_to_all import exchange_rows
from weft.distributed.virtual import run_virtual
from weft.planning.collective_cost import collective_cost
from weft.planning.placement_cost import expert_cost
from weft.proving.plan_proof import prove
from weft.training.models import MixtureOfExperts
from weft.training.placement import WholeModel

SENT = ((1, 2), (0, 3))
"""Rows of rank 0 for rank 0 and rank 1; those of rank 1."""


def test_rows_and_their_gradients_find_their_way() -> None:
    def program(group: AbstractGroup) -> tuple[Tensor, Tensor | None]:
        there, here = SENT[group.rank], tuple(sizes[group.rank] for sizes in SENT)
        rows = (torch.arange(3.0)[:, None] + 10 * group.rank).requires_grad_()
        found = exchange_rows(group, rows, there, here)
        (found * (1 + group.rank)).sum().backward()
        return found.detach().flatten(), rows.grad

    (first, gradient0), (second, gradient1) = run_virtual(program, 2).results
    assert first.tolist() == [0.0] and second.tolist() == [1.0, 2.0, 10.0, 11.0, 12.0]
    assert gradient0 is not None and gradient0.flatten().tolist() == [1.0, 2.0, 2.0]
    assert gradient1 is not None and gradient1.flatten().tolist() == [2.0, 2.0, 2.0]


def test_bytes_of_a_step_are_those_of_the_formula() -> None:
    """A rank sends 8 bytes for each expert, and four times the rows of its tokens, or as many as come to it."""
    width, num_experts, num_ranks = 6, 8, 4

    def program(group: AbstractGroup) -> tuple[int, int, int]:
        recording, layer = RecordingGroup(group), MixtureOfExperts(width, 5, num_experts)
        ExpertParallel(recording, group, WholeModel()).place(layer)
        torch.manual_seed(group.rank)
        layer(torch.randn(3, 16, width, requires_grad=True)).sum().backward()
        traffic = recording.traffic
        return traffic.num_calls["AllToAll"], traffic.num_bytes["AllToAll"], int(layer.statistics["tokens"].sum())

    results = run_virtual(program, num_ranks).results
    assert {num_calls for num_calls, _, _ in results} == {5}
    num_rows = sum(rows for _, _, rows in results)
    messages = sum(num_bytes for _, num_bytes, _ in results)
    assert messages == num_ranks * 8 * num_experts + 4 * num_rows * width * 4
    # What goes to other ranks, where all get alike: the formula of the planner, and that of the counts.
    share = (num_ranks - 1) / num_ranks
    planned = expert_cost(num_ranks, num_rows * width * 4 / num_ranks).bytes_sent
    counts = collective_cost("all_to_all", num_ranks, 8 * num_experts).busiest.bytes_sent
    assert num_ranks * (planned + counts) == share * messages


def test_real_processes_are_proved_too() -> None:
    recipe = small_moe(plan="data=1 expert=2")
    proof = prove(recipe, num_steps=2, tolerance=1e-10, in_float64=True)
    assert proof.passed, proof.finding
