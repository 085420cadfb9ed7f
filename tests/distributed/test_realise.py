"""One function realises every kind of plan: as many processes as it needs, on real and on virtual places."""

import pytest
import torch

from tests.distributed.virtual_plan import run_plan
from weft.distributed.group import AbstractGroup
from weft.distributed.place import Launch, LaunchedPlace
from weft.distributed.realise import RunSpec, realise
from weft.errors import PlanError
from weft.graph import State
from weft.recipes import find_recipe
from weft.specs import Choice, Mesh, Plan, parse_plan
from weft.specs.axes import AXES
from weft.specs.loading import load
from weft.training.replicas import AbstractReplicas, SoloReplicas

ASYNC = "data=4 consistency=async topology=server(shards=2)"
PAIRS = "data=4 consistency=gossip(ring,mix=pair)"


@pytest.mark.parametrize("plan", ["data=4", ASYNC, PAIRS])
def test_another_number_of_processes_is_refused(plan: str) -> None:
    place = LaunchedPlace(Launch("weft", 0, 2, "", 2))
    with pytest.raises(PlanError, match="another number of processes"), realise(plan, place):
        pass


def test_one_rank_needs_nobody() -> None:
    with realise("data=1", LaunchedPlace(Launch("nobody"))) as replicas:
        assert isinstance(replicas, SoloReplicas)


def test_a_plan_is_taken_as_data_too_and_checked() -> None:
    with realise(Plan(), LaunchedPlace(Launch("nobody"))) as replicas:
        assert isinstance(replicas, SoloReplicas)
    alone = Plan(consistency=Choice("local"))
    with pytest.raises(PlanError, match="nobody to agree with"), realise(alone, LaunchedPlace(Launch("nobody"))):
        pass


@pytest.mark.parametrize("plan", ["data=3", "data=3 consistency=local(2)", ASYNC, PAIRS])
def test_ranks_have_replicas_and_servers_have_none(plan: str) -> None:
    spec, chosen = RunSpec.of(find_recipe("digits_mlp"), (0,)), parse_plan(plan)

    def work(_group: AbstractGroup, replicas: AbstractReplicas) -> Mesh:
        replicas.join(State({"w": torch.zeros(4, requires_grad=True)}, {}, torch.zeros(0)))
        replicas.sum(torch.zeros(1))
        return replicas.mesh

    found = run_plan(chosen, work, spec=spec).results
    assert found[: chosen.num_ranks] == tuple(chosen.mesh(rank) for rank in range(chosen.num_ranks))
    assert set(found[chosen.num_ranks :]) <= {None}


def test_every_import_path_in_the_table_of_axes_leads_somewhere() -> None:
    values = AXES["consistency"].values()
    assert all(callable(load(path)) for value in values for path in value.realised_by.values())
    assert all(callable(load(path)) for value in values for path in value.equations.values())
    assert all(value.realised_by for value in values if value.is_available)
