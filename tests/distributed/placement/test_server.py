"""Parameter servers: the same bits as all-reduce, owners that carry the same load, one whole optimizer state."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.distributed.placement.cases import RankOrderGroup, gradients_of_rank, make_parameters, make_update, run_step
from weft.distributed.group import AbstractGroup, RecordingGroup
from weft.distributed.placement import AbstractExchange, AllReduceExchange, ServerExchange
from weft.distributed.placement.server import assign_owners
from weft.distributed.virtual import run_virtual
from weft.training.optimizers import AbstractRule, Adam, Momentum, Optimizer, OptimizerState, Shared, Slots

RULES: dict[str, AbstractRule] = {"momentum": Momentum(0.9, weight_decay=0.01), "adam": Adam()}
COUNTS = [3, 2, 2]  # samples of each rank: a ragged batch

MakeExchange = Callable[[AbstractGroup, dict[str, Tensor]], AbstractExchange]
Result = tuple[dict[str, Tensor], OptimizerState]


def train(group: AbstractGroup, make: MakeExchange, rule: AbstractRule, clip_norm: float | None = None) -> Result:
    """Some steps; one parameter goes unused by a rank, one by all, now and then."""
    group = RankOrderGroup(group)
    parameters = make_parameters()
    optimizer = Optimizer(rule, lr=0.05)
    state, exchange = optimizer.init(parameters), make(group, parameters)
    for step in range(4):
        gradients: dict[str, Tensor | None] = {**gradients_of_rank(parameters, group.rank, step)}
        gradients["b1"] = gradients["b1"] if step % 2 else None
        gradients["w2"] = gradients["w2"] if group.rank or step != 2 else None
        update = make_update(parameters, optimizer, state, clip_norm)
        _, state = run_step(exchange, gradients, COUNTS[group.rank] / sum(COUNTS), update)
    return {name: p.detach() for name, p in parameters.items()}, exchange.collect(state)


@pytest.mark.parametrize("num_shards", [1, 2, 3])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_servers_and_all_reduce_give_the_same_bits(
    rule: AbstractRule, clip_norm: float | None, num_shards: int
) -> None:
    through_servers = partial(ServerExchange, num_shards=num_shards)
    by_all = run_virtual(lambda group: train(group, AllReduceExchange, rule, clip_norm), 3).results
    by_servers = run_virtual(lambda group: train(group, through_servers, rule, clip_norm), 3).results
    for parameters, state in by_servers:
        expected, expected_state = by_all[0]
        assert all(torch.equal(parameters[name], expected[name]) for name in expected)
        assert torch.equal(state.shared.step, expected_state.shared.step)
        for name, slots in expected_state.slots.items():
            assert all(torch.equal(state.slots[name][slot], slots[slot]) for slot in slots), name


def test_clipping_does_something_in_that_comparison() -> None:
    free = run_virtual(lambda group: train(group, AllReduceExchange, Momentum()), 3).results[0][0]
    clipped = run_virtual(lambda group: train(group, AllReduceExchange, Momentum(), 0.5), 3).results[0][0]
    assert not torch.equal(free["w1"], clipped["w1"])


# ---- owners

sizes = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(0, 50), min_size=1, max_size=10)


@given(sizes=sizes, num_shards=st.integers(1, 5))
def test_owners_differ_in_load_by_one_tensor_at_most(sizes: dict[str, int], num_shards: int) -> None:
    parameters = {name: torch.empty(size, device="meta") for name, size in sizes.items()}
    owners = assign_owners(parameters, num_shards)
    assert list(owners) == list(parameters)
    assert set(owners.values()) <= set(range(num_shards))
    load = [sum(parameters[n].nbytes for n, owner in owners.items() if owner == shard) for shard in range(num_shards)]
    assert max(load) - min(load) <= max(parameter.nbytes for parameter in parameters.values())


def test_owners_of_a_small_model() -> None:
    assert assign_owners(make_parameters(), 2) == {"w1": 0, "b1": 1, "w2": 1, "b2": 1, "scale": 1}


# ---- state


class Shuffling(AbstractRule):
    """Keeps two slots and returns them in another order than it began with."""

    scope = "element"

    def initial_slots(self, parameter: Tensor) -> Slots:
        return {"last": torch.zeros_like(parameter), "before": torch.zeros_like(parameter)}

    def new_input(self, shared: Shared) -> Shared:
        return shared

    def prepare_param(self, parameter: Tensor, slots: Slots, shared: Shared) -> Tensor:
        return parameter

    def update_rule(self, gradient: Tensor, parameter: Tensor, slots: Slots, shared: Shared) -> tuple[Tensor, Slots]:
        return parameter - gradient, {"before": slots["last"].clone(), "last": gradient.clone()}


def test_collected_slots_keep_their_names() -> None:
    # Regression: owners sent slots in the order that the update left them in, the others took them in the first order.
    make = partial(ServerExchange, num_shards=2)
    results = run_virtual(lambda group: train(group, make, Shuffling()), 3).results
    whole = run_virtual(lambda group: train(group, AllReduceExchange, Shuffling()), 3).results[0][1]
    for _, state in results:
        for name, slots in whole.slots.items():
            assert all(torch.equal(state.slots[name][slot], slots[slot]) for slot in ("last", "before")), name


def test_collecting_leaves_the_own_state_alone() -> None:
    def program(group: AbstractGroup) -> tuple[bool, bool]:
        parameters = make_parameters()
        optimizer = Optimizer(Momentum(), lr=0.1)
        exchange = ServerExchange(group, parameters, 1)
        update = make_update(parameters, optimizer)
        _, state = run_step(exchange, gradients_of_rank(parameters, group.rank), 0.5, update)
        before = state.slots["w1"]["velocity"].clone()
        collected = exchange.collect(state)
        return torch.equal(state.slots["w1"]["velocity"], before), bool(collected.slots["w1"]["velocity"].any())

    assert run_virtual(program, 2).results == ((True, True), (True, True))


def test_all_unused_is_no_reason_to_fail() -> None:
    # Regression: the norm of no gradients at all could not be taken.
    def program(group: AbstractGroup) -> bool:
        parameters = make_parameters()
        exchange = ServerExchange(group, parameters, 2)
        run_step(exchange, dict.fromkeys(parameters), 0.5, make_update(parameters, clip_norm=1.0))
        return torch.equal(parameters["w1"], make_parameters()["w1"])

    assert run_virtual(program, 2).results == (True, True)


def test_no_owner_updates_where_the_loss_is_not_finite() -> None:
    def program(group: AbstractGroup) -> bool:
        parameters = make_parameters()
        update = make_update(parameters, clip_norm=1.0)
        gradients = gradients_of_rank(parameters, group.rank)
        loss = float("inf") if group.rank == 1 else 1.0
        _, state = run_step(ServerExchange(group, parameters, 2), gradients, 1 / 3, update, loss)
        unchanged = (torch.equal(p, q) for p, q in zip(parameters.values(), make_parameters().values(), strict=True))
        return state is update.state and all(unchanged)

    assert run_virtual(program, 3).results == (True, True, True)


# ---- traffic


@pytest.mark.parametrize("num_shards", [1, 2])
def test_bytes_told_are_bytes_handed_over(num_shards: int) -> None:
    def program(group: AbstractGroup) -> tuple[int, int, int]:
        recording = RecordingGroup(group)
        parameters = make_parameters()
        exchange = ServerExchange(recording, parameters, num_shards)
        run_step(exchange, gradients_of_rank(parameters, group.rank), 0.5, make_update(parameters))
        sent = recording.traffic.num_bytes
        return exchange.traffic().num_bytes, sent["Reduce"], sent["Broadcast"]

    results = run_virtual(program, 2).results
    whole = sum(p.nbytes for p in make_parameters().values())
    assert all(reduced == broadcast == whole for _, reduced, broadcast in results)
    # Every rank brings its gradients; of the parameters that come back, each is brought by its owner.
    assert sum(told for told, _, _ in results) == 2 * whole + whole


def test_the_time_of_servers_is_all_exposed() -> None:
    def program(group: AbstractGroup) -> tuple[float, float, float]:
        parameters = make_parameters()
        exchange = ServerExchange(group, parameters, 1)
        group.clock.charge(1.0)
        run_step(exchange, gradients_of_rank(parameters, group.rank), 0.5, make_update(parameters))
        traffic = exchange.traffic()
        return traffic.exposed, traffic.hidden, group.clock.now() - 1.0

    for exposed, hidden, spent in run_virtual(program, 2).results:
        assert exposed == pytest.approx(spent) and exposed > 0 and hidden == 0
