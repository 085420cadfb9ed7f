"""The exchange by all-reduce: what it sums, what it leaves alone, in which order, and when."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.distributed.placement.cases import gradients_of_rank, make_parameters, make_update, run_step
from weft.distributed.codecs import Bucket, Piece
from weft.distributed.codecs.topk import TopkCodec
from weft.distributed.collectives import AlgorithmChoice
from weft.distributed.group import AbstractGroup, RecordingGroup
from weft.distributed.placement import GradientExchange
from weft.distributed.placement import exchange as module
from weft.distributed.placement.buckets import plan_buckets
from weft.distributed.virtual import run_virtual
from weft.errors import PlanError
from weft.graph import EagerExecutor
from weft.planning.cluster import Link
from weft.planning.network import NetworkModel
from weft.specs import Batch
from weft.training.optimizers import Momentum, Optimizer
from weft.training.replicas import Traffic


@pytest.fixture
def tiny_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of 40 bytes: several packed ones and a large one from a handful of numbers."""
    monkeypatch.setattr(module, "plan_buckets", lambda parameters, key: plan_buckets(parameters, 40))


def weights_of(counts: Sequence[int]) -> list[float]:
    return [count / sum(counts) for count in counts]


def exchange_once(counts: Sequence[int], dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    """What every rank holds after one exchange in which rank r had `counts[r]` samples."""
    weights = weights_of(counts)

    def program(group: AbstractGroup) -> dict[str, Tensor | None]:
        parameters = make_parameters(dtype)
        exchange = GradientExchange(group, parameters)
        exchange.begin(weights[group.rank])
        if counts[group.rank]:
            for name, gradient in reversed(gradients_of_rank(parameters, group.rank).items()):
                exchange.add(name, gradient)
        _, sums = exchange.wait()
        return {name: total if total is None else total.clone() for name, total in sums.items()}

    return list(run_virtual(program, len(counts)).results)


def expected_sums(counts: Sequence[int], dtype: torch.dtype) -> dict[str, Tensor]:
    parameters = make_parameters(dtype)
    per_rank = [gradients_of_rank(parameters, rank) for rank in range(len(counts))]
    return {
        name: sum(
            (w * per_rank[r][name].double() for r, w in enumerate(weights_of(counts))),
            torch.zeros((), dtype=torch.float64),
        )
        for name in parameters
    }


# ---- what is summed


@settings(max_examples=20)
@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any))
def test_every_rank_gets_the_weighted_sum(counts: list[int]) -> None:
    """Ragged shares, and ranks without samples, who add nothing and count as zeros."""
    results = exchange_once(counts)
    for name, expected in expected_sums(counts, torch.float32).items():
        torch.testing.assert_close(results[0][name].double(), expected, rtol=1e-5, atol=1e-6)
        assert all(torch.equal(result[name], results[0][name]) for result in results)


def test_an_exact_quarter_on_one_rank_alone() -> None:
    # Regression: a rank that weighed 1/size started a mean while its peers started a sum. Targets make such weights.
    counts = [2, 3, 1, 2]
    results = exchange_once(counts, torch.float64)
    for name, expected in expected_sums(counts, torch.float64).items():
        torch.testing.assert_close(results[3][name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
def test_every_type_of_number(dtype: torch.dtype, tolerance: float, tiny_buckets: None) -> None:
    results = exchange_once([3, 2, 2], dtype)
    for name, expected in expected_sums([3, 2, 2], dtype).items():
        assert results[0][name].dtype == dtype
        torch.testing.assert_close(results[0][name].double(), expected, rtol=tolerance, atol=tolerance)


def test_types_may_be_mixed_in_one_model() -> None:
    def program(group: AbstractGroup) -> list[Tensor | None]:
        parameters = {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.float64), "c": torch.zeros(2)}
        parameters = {name: p.requires_grad_() for name, p in parameters.items()}
        exchange = GradientExchange(group, parameters)
        exchange.begin(1 / 3)
        for name, parameter in reversed(parameters.items()):
            exchange.add(name, torch.full_like(parameter, 3.0 * group.rank))
        return list(exchange.wait()[1].values())

    for a, b, c in run_virtual(program, 3).results:
        assert a.tolist() == [3.0] * 3 and c.tolist() == [3.0] * 2
        assert b.dtype == torch.float64 and b.tolist() == [3.0] * 2


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_gradient_may_lie_anyhow_in_memory(is_alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "plan_buckets", lambda p, key: plan_buckets(p, 1 if is_alone else 1000))

    def program(group: AbstractGroup) -> Tensor | None:
        parameters = {"w": torch.zeros(3, 2).requires_grad_(), "v": torch.zeros(4).requires_grad_()}
        exchange = GradientExchange(group, parameters)
        exchange.begin(0.5)
        exchange.add("v", torch.arange(8.0)[::2])
        # One rank's is a transposed view, the other has none: its zeros have the layout of the parameter.
        exchange.add("w", torch.arange(6.0).view(2, 3).t() if group.rank else None)
        return exchange.wait()[1]["w"]

    for total in run_virtual(program, 2).results:
        assert torch.equal(total, torch.arange(6.0).view(2, 3).t() / 2)


# ---- what has no part


def test_a_parameter_unused_everywhere_is_not_moved_by_its_momentum() -> None:
    def program(group: AbstractGroup) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        parameters = make_parameters()
        optimizer = Optimizer(Momentum(0.9), lr=0.1)
        exchange, update = GradientExchange(group, parameters), make_update(parameters, optimizer)
        _, state = run_step(exchange, gradients_of_rank(parameters, group.rank), 0.5, update)
        before = {name: p.detach().clone() for name, p in parameters.items()}
        some: dict[str, Tensor | None] = {**gradients_of_rank(parameters, group.rank, 1), "w2": None}
        if group.rank == 1:
            some["b1"] = None
        run_step(exchange, some, 0.5, make_update(parameters, optimizer, state))
        return before, {name: p.detach() for name, p in parameters.items()}

    for before, after in run_virtual(program, 2).results:
        assert torch.equal(before["w2"], after["w2"])
        assert not torch.equal(before["b1"], after["b1"])  # one rank used it


def test_a_parameter_used_by_one_rank_gets_its_gradient_alone() -> None:
    def program(group: AbstractGroup) -> dict[str, Tensor | None]:
        parameters = make_parameters()
        exchange = GradientExchange(group, parameters)
        exchange.begin(1 / 3)
        for name, gradient in reversed(gradients_of_rank(parameters, group.rank).items()):
            exchange.add(name, gradient if (name, group.rank) in (("w1", 2), ("b1", 0)) else None)
        return exchange.wait()[1]

    for sums in run_virtual(program, 3).results:
        assert [name for name, total in sums.items() if total is not None] == ["w1", "b1"]
        torch.testing.assert_close(sums["w1"], gradients_of_rank(make_parameters(), 2)["w1"] / 3)


def test_frozen_parameters_are_not_sent() -> None:
    def program(group: AbstractGroup) -> tuple[int, bool]:
        parameters = make_parameters()
        parameters["w1"].requires_grad_(False)
        exchange = GradientExchange(group, parameters)
        gradients = gradients_of_rank({name: p for name, p in parameters.items() if p.requires_grad}, group.rank)
        run_step(exchange, gradients, 0.5, make_update(parameters, Optimizer(Momentum(weight_decay=0.1), lr=0.1)))
        return exchange.traffic().num_bytes, torch.equal(parameters["w1"], make_parameters()["w1"])

    trained = sum(p.nbytes for name, p in make_parameters().items() if name != "w1")
    assert run_virtual(program, 2).results == ((trained, True), (trained, True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nothing_is_written_where_the_loss_of_any_rank_is_not_finite(bad: float) -> None:
    def program(group: AbstractGroup) -> tuple[float, bool]:
        parameters = make_parameters()
        update = make_update(parameters)
        loss = bad if group.rank == 1 else 0.25
        exchange = GradientExchange(group, parameters)
        total, state = run_step(exchange, gradients_of_rank(parameters, group.rank), 1 / 3, update, loss)
        kept = all(torch.equal(p, q) for p, q in zip(parameters.values(), make_parameters().values(), strict=True))
        return total, kept and state is update.state

    results = run_virtual(program, 3).results
    assert all(kept and not torch.isfinite(torch.tensor(total)) for total, kept in results)


def test_losses_are_summed_in_float64() -> None:
    def program(group: AbstractGroup) -> float:
        exchange = GradientExchange(group, make_parameters())
        return exchange.wait(1.0 + 2.0**-40 * group.rank)[0]

    assert run_virtual(program, 3).results == (3.0 + 3 * 2.0**-40,) * 3


# ---- in which order


@settings(max_examples=15)
@given(data=st.data())
def test_collectives_keep_one_order_whatever_order_gradients_come_in(data: st.DataObject) -> None:
    names = list(make_parameters())
    orders = [data.draw(st.permutations(names)) for _ in range(3)]
    sizes: list[list[int]] = [[], [], []]

    def program(group: AbstractGroup) -> list[Tensor | None]:
        recording = RecordingGroup(group)
        parameters = make_parameters()
        exchange = GradientExchange(recording, parameters)
        exchange.begin(1 / 3)
        gradients = gradients_of_rank(parameters, group.rank)
        for name in orders[group.rank]:
            exchange.add(name, gradients[name])
            sizes[group.rank].append(recording.traffic.num_bytes.get("AllReduce", 0))
        return list(exchange.wait()[1].values())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "plan_buckets", lambda parameters, key: plan_buckets(parameters, 40))
        results = run_virtual(program, 3).results
    expected = expected_sums([1, 1, 1], torch.float32).values()
    for result in results:
        for total, wanted in zip(result, expected, strict=True):
            assert total is not None
            torch.testing.assert_close(total.double(), wanted, rtol=1e-5, atol=1e-6)
    # All five gradients in, all five buckets out.
    assert {recorded[-1] for recorded in sizes} == {sum(p.nbytes for p in make_parameters().values())}


# ---- when

SECOND_PER_GRADIENT = 1.0


def backward_in_virtual_time(network: NetworkModel) -> tuple[list[module.BucketTimes], list[float], float, Traffic]:
    """One step of a real backward on 2 ranks, each gradient costing a second; what rank 0 saw."""

    def program(group: AbstractGroup) -> tuple[list[module.BucketTimes], list[float], float, Traffic]:
        torch.manual_seed(3)
        network = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
        executor = EagerExecutor(network, nn.functional.mse_loss)
        state = executor.initial_state()
        exchange = GradientExchange(group, state.parameters)
        exchange.begin(0.5)
        added: list[float] = []

        def sink(name: str, gradient: Tensor | None) -> None:
            group.clock.charge(SECOND_PER_GRADIENT)
            added.append(group.clock.now())
            exchange.add(name, gradient)

        executor(state, Batch((torch.randn(4, 8),), (torch.randn(4, 8),)), sink)
        exchange.finish(0.0, make_update(state.parameters))
        return exchange.spans, added, group.clock.now(), exchange.traffic()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "plan_buckets", lambda parameters, key: plan_buckets(parameters, 1))
        result: tuple[list[module.BucketTimes], list[float], float, Traffic]
        result = run_virtual(program, 2, network=network, choice=AlgorithmChoice("ring")).results[0]
    return result


def test_a_bucket_is_under_way_while_backward_still_runs() -> None:
    """4 gradients of 256 bytes, a second each; a ring of 2 takes 2 rounds of alpha a bucket: half a second."""
    spans, added, ended, _ = backward_in_virtual_time(NetworkModel(Link(alpha=0.25, beta=0.0)))
    assert added == [1.0, 2.0, 3.0, 4.0]
    assert [span.started for span in spans] == added
    assert spans[0].started < spans[0].ended <= added[-1]
    compute, communication = 4.0, 4 * 0.5 + 0.5  # four buckets and the report of the loss
    assert max(compute, communication) < ended < compute + communication


def test_what_is_hidden_and_what_is_waited_for_add_up() -> None:
    _, _, ended, traffic = backward_in_virtual_time(NetworkModel(Link(alpha=0.25, beta=0.0)))
    # Regression: the wait for the loss, behind which all buckets end, was counted as hidden and nothing as exposed.
    assert traffic.exposed == ended - 4.0 > 0
    assert traffic.hidden == 3.0  # buckets 0 to 2 are seen to be there when the next gradient comes
    assert traffic.num_bytes == 4 * 8 * 8 * 4


def test_a_slow_network_is_exposed() -> None:
    spans, _, ended, traffic = backward_in_virtual_time(NetworkModel(Link(alpha=10.0, beta=0.0)))
    assert traffic.exposed == ended - 4.0 > 10.0
    assert traffic.hidden == 3.0  # from the first gradient to the last, once, though three buckets were under way
    assert all(span.ended > span.waited == 4.0 for span in spans)


def test_buffers_are_used_again_and_steps_do_not_mix(tiny_buckets: None) -> None:
    def program(group: AbstractGroup) -> list[dict[str, Tensor]]:
        parameters = make_parameters()
        exchange, steps = GradientExchange(group, parameters), []
        for step in range(3):
            run_step(exchange, gradients_of_rank(parameters, group.rank, step), 0.5, make_update(parameters))
            steps.append({name: p.detach().clone() for name, p in parameters.items()})
        return steps

    first, second = run_virtual(program, 2).results
    expected = {name: p.detach().double() for name, p in make_parameters().items()}
    for step in range(3):
        for name in expected:
            gradients = [gradients_of_rank(make_parameters(), rank, step)[name].double() for rank in (0, 1)]
            expected[name] = expected[name] - (gradients[0] + gradients[1]) / 2
            torch.testing.assert_close(first[step][name].double(), expected[name], rtol=1e-5, atol=1e-5)
            assert torch.equal(first[step][name], second[step][name])


# ---- what a codec has kept of a parameter that nobody uses


def test_what_waits_of_a_parameter_is_sent_where_nobody_uses_it() -> None:
    # Regression: a codec sent, and took from what it kept, a part that was then thrown away with the unused parameter.
    def program(group: AbstractGroup) -> tuple[Tensor, int]:
        parameters = {name: nn.Parameter(torch.zeros(40)) for name in ("used", "unused", "never")}
        exchange = GradientExchange(group, parameters, TopkCodec(0.1))
        total, num_none = torch.zeros(40), 0
        for step in range(30):
            exchange.begin(0.5)
            exchange.add("used", torch.randn(40))
            exchange.add("unused", torch.arange(40.0) + 1 if step == 0 else None)
            exchange.add("never", None)
            _, sums = exchange.wait()
            assert sums["never"] is None
            found = sums["unused"]
            num_none += found is None
            total += 0 if found is None else found
        return total, num_none

    first, second = run_virtual(program, 2).results
    assert torch.equal(first[0], second[0]) and torch.equal(first[0], torch.arange(40.0) + 1)
    assert first[1] == second[1] > 0, "all has been sent, and it is left out again"


def test_tensors_that_are_too_large_for_places_of_32_bits_are_refused() -> None:
    large = Bucket((Piece("head.weight", 0, 2**31),), ((2**16, 2**15),), torch.float32)
    with pytest.raises(PlanError, match=r"too large for this compression \(head.weight: 2147483648 numbers"):
        module.check_sizes([large])
