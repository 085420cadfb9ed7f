"""A value that does not fit into 16 bits ends the run with the cure, on all ranks, and nobody waits for ever."""

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from tests.distributed.placement.cases import gradients_of_rank, make_parameters, make_update, run_step
from tests.distributed.virtual_plan import run_plan
from tests.processes.ranks import run_processes
from weft.distributed.codecs import ExactCodec, HalfCodec
from weft.distributed.group import AbstractGroup
from weft.distributed.place import find_launch, open_group
from weft.distributed.placement import GradientExchange
from weft.distributed.realise import RunSpec
from weft.distributed.virtual import run_virtual
from weft.errors import EncodingError
from weft.graph import State
from weft.training.optimizers import SGD, Optimizer
from weft.training.replicas import AbstractReplicas, Update


def large_gradients(parameters: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Rank 1 has a value that fits into 32 bits alone."""
    gradients = gradients_of_rank(parameters, rank)
    if rank == 1:
        gradients["w2"][0, 0] = 1e6
    return gradients


def take_step(group: AbstractGroup, loss: float = 0.5) -> str:
    """What a rank is told, and that it has not moved."""
    parameters = make_parameters()
    exchange = GradientExchange(group, parameters, HalfCodec("fp16"))
    try:
        run_step(exchange, large_gradients(parameters, group.rank), 1 / group.size, make_update(parameters), loss)
    except EncodingError as error:
        assert all(torch.equal(p, parameters[name]) for name, p in make_parameters().items())
        return str(error)
    return "no error"


def test_all_ranks_are_told_in_the_same_step() -> None:
    own, *others = sorted(run_virtual(take_step, 3).results)
    assert own.startswith("value does not fit into fp16 (w2:") or others[-1].startswith("value does not fit into fp16")
    assert all("w2" in text and "use compress=bf16" in text for text in (own, *others))


def take_step_as_this_rank() -> str:
    group = open_group(find_launch())
    try:
        return take_step(group)
    finally:
        group.close()


@pytest.mark.slow
def test_real_ranks_are_told_too() -> None:
    for text in run_processes(f"{__name__}:take_step_as_this_rank", 2):
        assert "w2" in text and "use compress=bf16" in text


def test_a_loss_that_is_not_finite_is_told_by_others() -> None:
    """No update is made, and the loop says which loss it was."""
    found = run_virtual(lambda group: take_step(group, math.nan), 2).results
    assert found == ("no error", "no error")


def test_a_sum_that_would_not_fit_is_told_too() -> None:
    """Half of 1e5 fits on each of two ranks, and 1e5 does not."""

    def program(group: AbstractGroup) -> str:
        parameters = make_parameters()
        exchange = GradientExchange(group, parameters, HalfCodec("fp16"))
        gradients = {name: torch.full_like(p, 1e5) for name, p in parameters.items()}
        with pytest.raises(EncodingError, match=r"1e\+05, at most: 65504"):
            run_step(exchange, gradients, 0.5, make_update(parameters))
        return "told"

    assert run_virtual(program, 2).results == ("told", "told")


def test_what_fits_is_exchanged_by_all() -> None:
    def program(group: AbstractGroup) -> bool:
        parameters = make_parameters()
        exchange = GradientExchange(group, parameters, ExactCodec())
        run_step(exchange, large_gradients(parameters, group.rank), 1 / group.size, make_update(parameters))
        return bool(parameters["w2"][0, 0] < -1e5)

    assert run_virtual(program, 2).results == (True, True)


@pytest.mark.parametrize(
    "plan",
    [
        "data=2 topology=server",
        "data=2 consistency=async topology=server",
        "data=2 consistency=elastic(2) topology=server",
        "data=2 consistency=elastic(2)",
        "data=2 consistency=local(2)",
        "data=2 consistency=gossip(ring)",
        "data=2 consistency=gossip(ring,mix=pair)",
    ],
)
def test_every_scheme_ends_with_the_cure(plan: str) -> None:
    """A weight is drawn beyond what fits by a gradient that a server is sent, or that a rank applies by itself."""

    def work(_group: AbstractGroup, replicas: AbstractReplicas) -> None:
        parameters = make_parameters()
        replicas.join(State(parameters, {}, torch.zeros(0)))
        optimizer = Optimizer(SGD(), lr=1.0)
        state = optimizer.init(parameters)
        for _ in range(6):
            add = replicas.begin(0.5)
            for name, gradient in large_gradients(parameters, 1).items():
                add(name, gradient)
            _, state = replicas.finish(0.5, Update(optimizer, parameters, state, 1.0, None))

    with pytest.raises(EncodingError, match=r"w2|2: .*use compress=bf16"):
        run_plan(f"{plan} compress=fp16", work, spec=RunSpec(Optimizer(SGD(), lr=1.0)))
