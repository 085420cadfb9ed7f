"""Rows of all ranks and one product: sums of an all-reduce, the same bits on all ranks, and the bytes that it takes."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.placement.proofs import prove_on_virtual_ranks, small_net
from weft.distributed.group import AbstractGroup, RecordingGroup
from weft.distributed.placement import GradientExchange
from weft.distributed.placement.factors import layers as module
from weft.distributed.placement.factors.exchange import FactorExchange
from weft.distributed.placement.factors.layers import FactoredLayers, FactoredWeight
from weft.distributed.virtual import run_virtual
from weft.planning.factor_cost import FactoredShape, factored_cost
from weft.specs import parse_plan
from weft.training.replicas import Traffic

INPUTS, OUTPUTS = 32, 24


@pytest.fixture(autouse=True)
def small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_BYTES", 0)


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(INPUTS, OUTPUTS), nn.Tanh(), nn.Linear(OUTPUTS, 3))


def samples(rank: int, count: int) -> Tensor:
    return torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(rank))


Backward = Callable[[nn.Sequential, int], None]
Exchanged = tuple[dict[str, Tensor | None], Traffic, dict[str, int]]


def in_backward(counts: Sequence[int]) -> Backward:
    """Of a mean over so many samples of each rank."""

    def backward(model: nn.Sequential, rank: int) -> None:
        if counts[rank]:
            model(samples(rank, counts[rank])).square().sum(1).mean().backward()

    return backward


def exchange_once(weights: Sequence[float], backward: Backward, *, with_factors: bool = True) -> list[Exchanged]:
    """The sums of every rank, its traffic, and the bytes that it gave to each kind of call."""

    def program(group: AbstractGroup) -> Exchanged:
        recording, model, factors = RecordingGroup(group), net(), FactoredLayers()
        parameters = dict(model.named_parameters())
        if with_factors:
            factors.find([model], {id(p): name for name, p in parameters.items()})
        exchange = GradientExchange(recording, parameters, factors=factors)
        exchange.begin(weights[group.rank])
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda p, own=name: exchange.add(own, p.grad))
        backward(model, group.rank)
        with torch.no_grad():
            _, sums = exchange.wait()
        kept = {n: None if t is None else t.clone() for n, t in sums.items()}
        return kept, exchange.traffic(), recording.traffic.num_bytes

    return list(run_virtual(program, len(weights)).results)


def check_same(found: Sequence[Exchanged], weights: Sequence[float], backward: Backward) -> None:
    """The bits of rank 0 on all, and the numbers of an all-reduce."""
    dense = exchange_once(weights, backward, with_factors=False)[0][0]
    for sums, _, _ in found:
        for name, total in sums.items():
            first, expected = found[0][0][name], dense[name]
            if total is None or first is None or expected is None:
                assert total is first is expected is None
                continue
            assert torch.equal(total, first)
            torch.testing.assert_close(total, expected)


@pytest.mark.parametrize("counts", [(2, 2), (3, 1), (2, 0), (0, 5), (1, 2, 3), (4, 4, 0, 1)])
def test_sums_are_those_of_an_all_reduce(counts: tuple[int, ...]) -> None:
    weights = [count / sum(counts) for count in counts]
    check_same(exchange_once(weights, in_backward(counts)), weights, in_backward(counts))


def test_rows_are_sent_where_they_are_fewer_bytes() -> None:
    """2 * 24 * 32 / (24 + 32) = 27.4: up to 27 rows of all ranks."""
    for counts, is_factored in (((13, 14), True), ((14, 14), False)):
        weights = [count / sum(counts) for count in counts]
        found = exchange_once(weights, in_backward(counts))
        check_same(found, weights, in_backward(counts))
        rest = 4 * (OUTPUTS + 3) + 4 * 3 * OUTPUTS + 8 * 2  # of biases, the other weight, two numbers of rows
        sent = 4 * counts[0] * (INPUTS + OUTPUTS) if is_factored else 4 * INPUTS * OUTPUTS
        assert found[0][1].num_bytes == rest + sent


def test_the_cost_is_what_is_counted() -> None:
    """Of two ranks each sends its rows once."""
    layers = [FactoredShape(INPUTS, OUTPUTS), FactoredShape(OUTPUTS, 3)]
    num_bytes = 4.0 * sum(layer.num_weights for layer in layers)
    cost = factored_cost(parse_plan("data=2 compress=factors"), layers, num_rows=4, num_bytes=num_bytes).busiest
    (_, traffic, recorded), _ = exchange_once([0.5, 0.5], in_backward((2, 2)))
    numbers, biases = 8 * len(layers), 4 * (OUTPUTS + 3)
    assert recorded["AllGather"] == cost.bytes_sent + numbers
    assert traffic.num_bytes == recorded["AllGather"] + biases


def test_a_layer_that_nobody_uses_has_no_gradient() -> None:
    found = exchange_once([0.5, 0.5], lambda model, rank: None)
    assert all(total is None for sums, _, _ in found for total in sums.values())


def test_a_layer_that_one_rank_uses() -> None:
    def backward(model: nn.Sequential, rank: int) -> None:
        (model(samples(rank, 2)) if rank else model.get_parameter("2.bias")).square().sum().backward()

    check_same(exchange_once([0.5, 0.5], backward), [0.5, 0.5], backward)


def test_rows_that_backward_does_not_come_to_are_zero() -> None:
    def backward(model: nn.Sequential, rank: int) -> None:
        loss, other = model(samples(rank, 2)).square().mean(), model(samples(rank, 3)).sum()
        (loss if rank else loss + other).backward()
        assert other.requires_grad  # its forward was told of

    check_same(exchange_once([0.5, 0.5], backward), [0.5, 0.5], backward)


def test_a_rank_whose_samples_do_not_count_sends_none() -> None:
    def backward(model: nn.Sequential, rank: int) -> None:
        (model(samples(rank, 2)).square().mean() * (float("inf") if rank else 1.0)).backward()

    found = exchange_once([1.0, 0.0], backward)
    alone = exchange_once([1.0], backward)
    torch.testing.assert_close(found[1][0]["0.weight"], alone[0][0]["0.weight"])


def test_what_a_rank_has_beside_its_rows_counts() -> None:
    """A penalty on the weight itself; of one rank alone."""

    def backward(model: nn.Sequential, rank: int) -> None:
        loss = model(samples(rank, 2)).square().mean()
        (loss if rank else loss + model.get_parameter("0.weight").square().sum()).backward()

    check_same(exchange_once([0.25, 0.75], backward), [0.25, 0.75], backward)


@pytest.mark.parametrize("rank_of_hook", [0, 1])
def test_one_rank_that_has_no_rows_makes_all_multiply_themselves(rank_of_hook: int) -> None:
    def backward(model: nn.Sequential, rank: int) -> None:
        if rank == rank_of_hook:
            model.get_parameter("0.weight").register_hook(lambda gradient: 3 * gradient)
        model(samples(rank, 2)).square().mean().backward()

    check_same(exchange_once([0.5, 0.5], backward), [0.5, 0.5], backward)


def test_rows_that_nobody_was_told_of_count() -> None:
    """A graph that was gone through before: its second backward comes to a forward that is not expected any more."""

    def backward(model: nn.Sequential, rank: int) -> None:
        x = samples(rank, 2).requires_grad_()
        loss = model(x).square().mean()
        torch.autograd.backward(loss, retain_graph=True, inputs=[x])  # of no parameter, and its forward is used up
        loss.backward()

    check_same(exchange_once([0.5, 0.5], backward), [0.5, 0.5], backward)


# ---- proofs, and faults


@pytest.mark.parametrize("plan", ["data=2", "data=3", "data=2 topology=ring", "data=8"])
def test_one_rank_gives_the_same(plan: str) -> None:
    """Of 7 samples for 8 ranks one has none."""
    assert prove_on_virtual_ranks(small_net("mlp", batch_size=7), f"{plan} compress=factors").passed


@pytest.mark.parametrize("settings", [{"accumulate": 2}, {"accumulate": 3, "clip_norm": 0.5}])
def test_micro_batches_append_rows(settings: dict[str, object]) -> None:
    assert prove_on_virtual_ranks(small_net("mlp", batch_size=14, **settings), "data=2 compress=factors").passed


def test_float32_is_off_by_rounding() -> None:
    proof = prove_on_virtual_ranks(small_net("mlp", batch_size=7), "data=2 compress=factors", dtype=torch.float32)
    assert proof.passed


def test_rows_of_a_rank_that_are_dropped_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = FactoredWeight.multiply

    def wrong(self: FactoredWeight, rows: Tensor, total: Tensor | None = None) -> Tensor:
        return right(self, rows[:-1] if total is None else rows, total)

    monkeypatch.setattr(FactoredWeight, "multiply", wrong)
    assert not prove_on_virtual_ranks(small_net("mlp", batch_size=7), "data=2 compress=factors").passed


def test_weights_that_are_forgotten_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of 4 and 3 samples that count alike."""
    right = module.FactoredWeight.append

    def wrong(self: FactoredWeight, x: Tensor, dy: Tensor, scale: float) -> None:
        right(self, x, dy / len(dy) * 3.5, scale)

    monkeypatch.setattr(FactoredWeight, "append", wrong)
    assert not prove_on_virtual_ranks(small_net("mlp", batch_size=7), "data=2 compress=factors").passed


def test_a_rank_with_rows_of_its_own_order_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in another order on one rank alone: replicas would drift apart."""
    right = FactorExchange.start

    def wrong(self: FactorExchange, name: str, weight: float) -> object:
        pending = right(self, name, weight)
        make, rank = pending._make, self._group.rank
        pending._make = lambda total: make(total) * (1 + 1e-15 * rank)
        return pending

    monkeypatch.setattr(FactorExchange, "start", wrong)
    proof = prove_on_virtual_ranks(small_net("mlp", batch_size=7), "data=2 compress=factors")
    assert "replicas differ" in proof.finding
