"""Synchronous ranks through servers: after every step the bits of one rank, and all that a group does together."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.consistency.server.served import LR, Course, make_parameters, pull, spec_of
from weft.distributed.consistency.server import ServedReplicas, serve, settings_of
from weft.distributed.consistency.server.clipping import NormExchange
from weft.distributed.group import AbstractGroup
from weft.distributed.group.faulty import Kill
from weft.distributed.mailbox import FaultyMailbox, VirtualMailbox
from weft.distributed.virtual import die, run_virtual
from weft.errors import PeerLostError
from weft.graph import State
from weft.specs import parse_plan
from weft.training.checkpoint import Entry
from weft.training.optimizers import (
    SGD,
    AbstractOptimizer,
    AbstractRule,
    Adam,
    Momentum,
    Optimizer,
    OptimizerState,
    Shared,
    Slots,
    TorchOptimizer,
)
from weft.training.replicas import Update

STEPS = 6
OPTIMIZERS: dict[str, Callable[[], AbstractOptimizer]] = {
    "sgd": lambda: Optimizer(SGD(), lr=LR),
    "momentum": lambda: Optimizer(Momentum(), lr=LR),
    "adam": lambda: Optimizer(Adam(), lr=LR),
    "torch": lambda: TorchOptimizer(torch.optim.RMSprop, lr=LR),
}
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Setup:
    """Of `num_shards` shards; `has_gradient(name, rank, step)` says which parameters have a part in which loss."""

    make: Callable[[], AbstractOptimizer] = OPTIMIZERS["momentum"]
    num_ranks: int = 3
    num_shards: int = 2
    clip_norm: float | None = None
    counts: tuple[int, ...] = (1, 1, 1)  # samples of each rank
    has_gradient: Callable[[str, int, int], bool] = lambda name, rank, step: True
    loss: Callable[[int, int], float] = lambda rank, step: 1.0 + rank + step

    @property
    def course(self) -> Course:
        text = f"data={self.num_ranks} topology=server(shards={self.num_shards})"
        return Course(parse_plan(text), make_optimizer=self.make, clip_norm=self.clip_norm)

    def weight(self, rank: int) -> float:
        return self.counts[rank] / sum(self.counts)

    def gradient(self, parameters: Weights, name: str, rank: int, step: int) -> Tensor | None:
        return pull(parameters[name], rank, step) if self.has_gradient(name, rank, step) else None


def on_ranks(setup: Setup, work: Callable[[ServedReplicas, AbstractOptimizer], Any], faults: Any = ()) -> list[Any]:
    """Virtual workers, and servers after them."""
    course, size = setup.course, setup.num_ranks

    def program(group: AbstractGroup) -> Any:
        mailbox = FaultyMailbox(VirtualMailbox(group), faults, die=die)
        if group.rank >= size:
            return serve(mailbox, spec_of(course, group.rank - size))
        optimizer = setup.make()
        settings = settings_of(course.plan, optimizer, setup.clip_norm)
        return work(ServedReplicas(mailbox, settings, [0]), optimizer)

    return list(run_virtual(program, size + setup.num_shards, timeout=1e6).results[:size])


def copy(parameters: Weights) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def take_steps(
    setup: Setup, replicas: ServedReplicas, parameters: Weights, state: OptimizerState, steps: range
) -> list[tuple[float, Weights]]:
    """The loss of all, and the weights after every step."""
    rank, found = replicas.mesh.rank, []
    for step in steps:
        assert replicas.next_step(step) == step
        add = replicas.begin(setup.weight(rank))
        for name in reversed(parameters):
            add(name, setup.gradient(parameters, name, rank, step))
        update = Update(setup.make(), parameters, state, LR, setup.clip_norm)
        loss, _ = replicas.finish(setup.loss(rank, step) * setup.weight(rank), update)
        found.append((loss, copy(parameters)))
    return found


def train(setup: Setup) -> list[list[tuple[float, Weights]]]:
    def work(replicas: ServedReplicas, optimizer: AbstractOptimizer) -> Any:
        parameters = make_parameters()
        replicas.join(State(parameters, {}, torch.zeros(0)))
        return take_steps(setup, replicas, parameters, optimizer.init(parameters), range(STEPS))

    return on_ranks(setup, work)


def follow(setup: Setup) -> list[tuple[float, Weights]]:
    """One rank, with the weighted sum of all gradients in the order of ranks."""
    parameters, optimizer = make_parameters(), setup.make()
    state, found, ranks = optimizer.init(parameters), [], range(setup.num_ranks)
    for step in range(STEPS):
        total: dict[str, Tensor | None] = {}
        for name in parameters:
            given = {rank: setup.gradient(parameters, name, rank, step) for rank in ranks}
            zeros = torch.zeros_like(parameters[name])
            terms = [zeros if gradient is None else gradient * setup.weight(rank) for rank, gradient in given.items()]
            is_used = any(gradient is not None for gradient in given.values())
            total[name] = sum(terms[1:], terms[0]).detach() if is_used else None
        state = Update(optimizer, parameters, state, LR, setup.clip_norm).apply(total)
        losses = [setup.loss(rank, step) * setup.weight(rank) for rank in ranks]
        found.append((sum(losses[1:], losses[0]), copy(parameters)))
    return found


def is_same(first: list[tuple[float, Weights]], second: list[tuple[float, Weights]]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(a[0] == b[0] and all(torch.equal(a[1][n], b[1][n]) for n in b[1]) for a, b in pairs)


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize(("num_shards", "counts"), [(1, (3, 2, 2)), (2, (1, 1, 1)), (2, (3, 2, 2)), (3, (1, 1, 1))])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_step_has_the_bits_of_one_rank(
    name: str, num_shards: int, counts: tuple[int, ...], clip_norm: float | None
) -> None:
    setup = Setup(OPTIMIZERS[name], num_shards=num_shards, counts=counts, clip_norm=clip_norm)
    expected = follow(setup)
    assert all(is_same(found, expected) for found in train(setup))


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_parameters_without_a_gradient_are_left_alone(clip_norm: float | None) -> None:
    """A whole shard without one too, and all of them: the step still counts for Adam."""

    def has_gradient(name: str, rank: int, step: int) -> bool:
        return {0: rank != 1, 1: name == "w1", 2: name != "w1", 3: False}.get(step, True)

    setup = Setup(OPTIMIZERS["adam"], clip_norm=clip_norm, has_gradient=has_gradient, counts=(3, 2, 2))
    assert all(is_same(found, follow(setup)) for found in train(setup))


def test_norms_of_one_shard_alone_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: every shard clips by what it holds itself."""
    setup, true_start = Setup(clip_norm=0.5), NormExchange.start

    def start(exchange: NormExchange, update: int, norms: Any) -> None:
        true_start(exchange, update, norms)
        exchange._peers = ()

    monkeypatch.setattr(NormExchange, "start", start)
    assert not any(is_same(found, follow(setup)) for found in train(setup))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_no_weight_changes_if_the_loss_of_one_rank_is_not_finite(bad: float) -> None:
    setup = Setup(loss=lambda rank, step: bad if (rank, step) == (1, STEPS - 1) else 1.0, clip_norm=0.5)
    for found in train(setup):
        assert not math.isfinite(found[-1][0]) and all(math.isfinite(loss) for loss, _ in found[:-1])
        assert all(torch.equal(found[-1][1][name], weight) for name, weight in found[-2][1].items())


def test_ranks_sum_gather_agree_and_evaluate_together() -> None:
    def work(replicas: ServedReplicas, optimizer: AbstractOptimizer) -> Any:
        parameters, rank = make_parameters(), replicas.mesh.rank
        buffers = {"mean": torch.full((2,), float(rank)), "count": torch.tensor(10 * rank)}
        model = State(parameters, buffers, torch.zeros(0))
        replicas.join(model)
        assert replicas.is_synchronous and buffers["mean"].tolist() == [0.0, 0.0]
        for buffer in buffers.values():
            buffer += rank + 1
        take_steps(Setup(), replicas, parameters, optimizer.init(parameters), range(1))
        agreed = [replicas.agree_to_stop(False), replicas.agree_to_save(rank == 2), replicas.agree_to_stop(rank == 1)]
        gathered = [part.tolist() for part in replicas.gather(torch.tensor([rank, -rank]))]
        replicas.dismiss()
        with replicas.use_consensus(model) as consensus:
            assert consensus.judges is replicas
            total = replicas.sum(torch.tensor([float(rank)])).item()
        take_steps(Setup(), replicas, parameters, optimizer.init(parameters), range(1, 2))
        return agreed, gathered, total, buffers["mean"].tolist(), buffers["count"].item()

    expected = ([False, True, True], [[0, 0], [1, -1], [2, -2]], 3.0, [2.0, 2.0], 1)
    assert on_ranks(Setup(), work) == [expected] * 3


def test_frozen_parameters_are_those_of_rank_0() -> None:
    def work(replicas: ServedReplicas, _: AbstractOptimizer) -> float:
        frozen = torch.full((3,), float(replicas.mesh.rank))
        replicas.join(State({**make_parameters(), "frozen": frozen}, {}, torch.zeros(0)))
        return float(frozen.sum())

    assert on_ranks(Setup(), work) == [0.0] * 3


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
    """Once, slots were sent in the order that an update left them in, and taken in the first order."""
    setup = Setup(lambda: Optimizer(Shuffling(), lr=LR))

    def work(replicas: ServedReplicas, optimizer: AbstractOptimizer) -> Any:
        parameters = make_parameters()
        replicas.join(State(parameters, {}, torch.zeros(0)))
        take_steps(setup, replicas, parameters, optimizer.init(parameters), range(2))
        return copy(parameters), replicas.collect(optimizer.init(parameters)).slots

    for weights, slots in on_ranks(setup, work):
        before = {name: weights[name] + own["last"] for name, own in slots.items()}
        for name, own in slots.items():
            torch.testing.assert_close(before[name] + own["before"], make_parameters()[name].detach())


@pytest.mark.parametrize("name", ["adam", "momentum"])
def test_every_rank_collects_the_state_and_a_resumed_run_has_the_same_bits(name: str) -> None:
    setup = Setup(OPTIMIZERS[name], clip_norm=0.5)

    def work(replicas: ServedReplicas, optimizer: AbstractOptimizer) -> Any:
        parameters = make_parameters()
        replicas.join(State(parameters, {}, torch.zeros(0)))
        first = take_steps(setup, replicas, parameters, optimizer.init(parameters), range(3))
        state = replicas.collect(optimizer.init(parameters))
        slots = {f"slot/{n}/{slot}": t for n, own in state.slots.items() for slot, t in own.items()}
        assert slots and int(state.shared.step) == 3
        entries = {key: Entry(tensor) for key, tensor in slots.items()}
        replicas.remember(3, {**entries, "optimizer/step": Entry(state.shared.step)})
        return [*first, *take_steps(setup, replicas, parameters, state, range(3, STEPS))]

    assert all(is_same(found, follow(setup)) for found in on_ranks(setup, work))


def test_a_shard_that_is_lost_with_a_part_of_the_norm_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(PeerLostError, match="server is lost"):
        on_ranks_with_a_lost_shard(Setup(clip_norm=0.5))


def on_ranks_with_a_lost_shard(setup: Setup) -> None:
    def work(replicas: ServedReplicas, optimizer: AbstractOptimizer) -> Any:
        parameters = make_parameters()
        replicas.join(State(parameters, {}, torch.zeros(0)))
        for step in range(STEPS):
            replicas._mailbox.clock.charge(0.1)
            take_steps(setup, replicas, parameters, optimizer.init(parameters), range(step, step + 1))

    on_ranks(setup, work, [Kill(4, after_seconds=0.25)])


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_no_step_is_taken_and_nothing_summed_without_a_rank_that_is_lost(clip_norm: float | None) -> None:
    """As in a group: the others would go on with the updates of fewer ranks, and save them."""
    setup, taken = Setup(clip_norm=clip_norm), []

    def work(replicas: ServedReplicas, optimizer: AbstractOptimizer) -> Any:
        parameters = make_parameters()
        replicas.join(State(parameters, {}, torch.zeros(0)))
        state = optimizer.init(parameters)
        for step in range(STEPS):
            replicas._mailbox.clock.charge(0.1)
            (found,) = take_steps(setup, replicas, parameters, state, range(step, step + 1))
            taken.append((step, *found))

    with pytest.raises(PeerLostError):
        on_ranks(setup, work, [Kill(2, after_seconds=0.25)])
    expected = follow(Setup(clip_norm=clip_norm))
    assert taken and all(is_same([(loss, weights)], expected[step : step + 1]) for step, loss, weights in taken)


def test_a_rank_that_leaves_while_others_sum_ends_the_run() -> None:
    def work(replicas: ServedReplicas, _optimizer: AbstractOptimizer) -> Any:
        replicas.join(State(make_parameters(), {}, torch.zeros(0)))
        return replicas.sum(torch.ones(1)) if replicas.mesh.rank < 2 else None

    with pytest.raises(PeerLostError):
        on_ranks(Setup(), work)
