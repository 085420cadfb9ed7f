"""A rank that fails at any point of any schedule ends all ranks with its error, and nobody waits for ever."""

import pytest
from torch import nn

from tests.distributed.placement.pipeline.cases import SCHEDULES, execute
from tests.distributed.placement.pipeline.plain_partition import cut_evenly
from tests.distributed.placement.pipeline.test_pipeline_executor import batch_of, build_executor, layers
from weft.distributed.group import AbstractGroup, Kill, RecordingGroup
from weft.distributed.placement.pipeline import Action, schedule_of
from weft.distributed.virtual import run_virtual
from weft.errors import PeerLostError
from weft.specs import parse_plan


class OwnError(Exception):
    pass


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_any_action_ends_all_ranks(schedule: str, rank: int) -> None:
    plan = parse_plan(f"pipeline=2 schedule={schedule}")
    for failing in schedule_of(2, plan.schedule).stages[rank]:

        def program(group: AbstractGroup, failing: Action = failing) -> None:
            def charge(action: Action, _num_samples: int) -> None:
                if group.rank == rank and action == failing:
                    raise OwnError(f"{failing}")

            executor = build_executor(group, str(plan))
            executor.charge_with(charge)
            executor(executor.initial_state(), batch_of(8), lambda name, gradient: None)

        with pytest.raises(OwnError, match=failing.kind):
            run_virtual(program, 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_at_any_call_is_named_by_the_other(schedule: str, rank: int) -> None:
    plan = f"pipeline=2 schedule={schedule}"
    for call in range(_num_calls(plan, rank)):
        with pytest.raises(PeerLostError, match=f"rank {rank} is lost"):
            execute(layers, cut_evenly, plan, [batch_of(8)] * 2, faults=[Kill(rank, at_call=call)])


def _num_calls(plan: str, rank: int) -> int:
    """That a rank makes in two steps, those that end after everything it was waited for left out."""
    groups: list[RecordingGroup] = []

    def recording(group: AbstractGroup) -> AbstractGroup:
        groups.append(RecordingGroup(group))
        return groups[-1]

    execute(layers, cut_evenly, plan, [batch_of(8)] * 2, recording)
    traffic = next(group for group in groups if group.rank == rank).traffic
    return sum(traffic.num_calls.values())


def test_a_loss_that_raises_is_told_by_the_stage_that_has_it() -> None:
    class Head(nn.Linear):
        def forward(self, x: object) -> object:  # type: ignore[override]
            raise OwnError("of the last stage")

    with pytest.raises(OwnError, match="of the last stage"):
        execute(lambda: nn.Sequential(nn.Linear(4, 4), Head(4, 4)), cut_evenly, "pipeline=2", [batch_of(8)])
