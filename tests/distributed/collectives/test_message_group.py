"""Collectives over Send and Recv: bytes on the wire, bits of the result, order of the sum, choice and probe."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.distributed.collectives import AlgorithmChoice, AlgorithmName, MessageGroup, probe
from weft.distributed.collectives.message_group import FIRST_COLLECTIVE_TAG
from weft.distributed.group import AbstractGroup, AllReduce, GroupTraffic, RecordingGroup, Recv, SoloGroup
from weft.distributed.virtual import run_virtual
from weft.errors import UsageError
from weft.planning.cluster import Link
from weft.planning.collective_cost import (
    ALL_REDUCE_ALGORITHMS,
    Algorithm,
    AllReduceAlgorithm,
    all_reduce_cost,
    collective_cost,
)
from weft.planning.network import NetworkModel


def traffic_of_all_reduce(group: AbstractGroup, algorithm: AlgorithmName, length: int) -> GroupTraffic:
    recording = RecordingGroup(group)
    MessageGroup(recording, AlgorithmChoice(algorithm, ranks_per_host=3)).all_reduce(torch.ones(length))
    return recording.traffic


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("algorithm", ALL_REDUCE_ALGORITHMS)
def test_bytes_on_the_wire_are_those_of_the_formula(algorithm: AllReduceAlgorithm, size: int) -> None:
    for length in (0, 1, 7, 24 * size, 24 * size + 5):
        program = partial(traffic_of_all_reduce, algorithm=algorithm, length=length)
        sent = [traffic.bytes_sent for traffic in run_virtual(program, size).results]
        # Groups that cannot be cut into hosts of three, as parts of a mesh may be, go round a ring.
        used = Algorithm("ring") if algorithm == "hierarchical" and size % 3 else Algorithm(algorithm, 3)
        cost = all_reduce_cost(used, size, 4 * length)
        assert sum(sent) == pytest.approx(cost.total_bytes)
        ragged = 4 * cost.rounds if length % 24 and algorithm != "tree" else 0
        assert sent == pytest.approx([one.bytes_sent for one in cost.addresses], abs=ragged)


def test_ring_sends_two_n_minus_one_nths_of_the_message_to_the_right_alone() -> None:
    program = partial(traffic_of_all_reduce, algorithm="ring", length=4000)
    for rank, traffic in enumerate(run_virtual(program, 4).results):
        assert traffic.sent_to == {(rank + 1) % 4: 2 * 3 * 16000 // 4}
        assert traffic.received_from == {(rank - 1) % 4: 2 * 3 * 16000 // 4}


def test_the_virtual_group_sends_the_same_bytes() -> None:
    def program(group: AbstractGroup) -> None:
        group.all_reduce(torch.ones(4000))

    result = run_virtual(program, 4, choice=AlgorithmChoice("ring"))
    assert result.bytes_sent == (24000,) * 4 and result.num_messages == 24


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_other_collectives_send_the_bytes_of_the_formula(size: int) -> None:
    def program(group: AbstractGroup) -> dict[str, int]:
        sent = {}
        for name in ("all_gather", "all_to_all", "reduce_scatter"):
            recording = RecordingGroup(group)
            part, whole = torch.ones(6), torch.ones(6 * size)
            arguments = {
                "all_gather": (whole, part),
                "all_to_all": (whole, whole.clone()),
                "reduce_scatter": (part, whole),
            }[name]
            getattr(MessageGroup(recording), name)(*arguments)
            sent[name] = recording.traffic.bytes_sent
        return sent

    for sent in run_virtual(program, size).results:
        for name, num_bytes in sent.items():
            assert num_bytes == pytest.approx(collective_cost(name, size, 24 * size).rank_bytes)


def noisy_sum(group: AbstractGroup, algorithm: AlgorithmName, length: int, over_messages: bool) -> torch.Tensor:
    tensor = torch.randn(length, generator=torch.Generator().manual_seed(group.rank))
    choice = AlgorithmChoice(algorithm, ranks_per_host=2)
    (MessageGroup(group, choice) if over_messages else group).all_reduce(tensor)
    return tensor


@pytest.mark.parametrize("algorithm", ALL_REDUCE_ALGORITHMS)
@given(size=st.integers(1, 9), length=st.integers(0, 40))
def test_sum_is_near_float64_and_bitwise_the_same_everywhere(
    algorithm: AllReduceAlgorithm, size: int, length: int
) -> None:
    by_messages = partial(noisy_sum, algorithm=algorithm, length=length, over_messages=True)
    results = run_virtual(by_messages, size).results
    inputs = [torch.randn(length, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    wanted = torch.stack(inputs).double().sum(0)
    assert torch.allclose(results[0].double(), wanted, atol=1e-5)
    assert all(torch.equal(result, results[0]) for result in results)
    natively = partial(noisy_sum, algorithm=algorithm, length=length, over_messages=False)
    virtual = run_virtual(natively, size, choice=AlgorithmChoice(algorithm, ranks_per_host=2)).results
    assert torch.equal(virtual[0], results[0]), "the two drivers sum in different orders"


def test_summation_orders_are_as_documented() -> None:
    x = [torch.randn(64, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    run = {
        name: run_virtual(partial(noisy_sum, algorithm=name, length=64, over_messages=True), 4).results[0]
        for name in ALL_REDUCE_ALGORITHMS
    }
    assert torch.equal(run["direct"], ((x[0] + x[1]) + x[2]) + x[3])
    assert torch.equal(run["tree"], (x[0] + x[1]) + (x[2] + x[3]))
    assert torch.equal(run["halving_doubling"], (x[0] + x[2]) + (x[1] + x[3]))
    assert torch.equal(run["ring"][:16], (((x[1] + x[2]) + x[3]) + x[0])[:16])
    assert not torch.equal(run["direct"], run["tree"]), "the numbers do not tell the orders apart"


def test_wrong_choices_are_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'ring'"):
        AlgorithmChoice("rng")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="ranks_per_host"):
        AlgorithmChoice("hierarchical")


def test_native_leaves_the_call_to_the_transport() -> None:
    def program(group: AbstractGroup) -> GroupTraffic:
        recording = RecordingGroup(group)
        MessageGroup(recording, AlgorithmChoice("native")).all_reduce(torch.ones(8))
        return recording.traffic

    for traffic in run_virtual(program, 3).results:
        assert traffic.num_calls == {"AllReduce": 1} and traffic.num_bytes == {"AllReduce": 32}


def test_tags_of_collectives_are_refused_to_messages() -> None:
    def program(group: AbstractGroup) -> None:
        MessageGroup(group).start(Recv(torch.zeros(1), 1 - group.rank, FIRST_COLLECTIVE_TAG))

    with pytest.raises(UsageError, match="kept for collectives"):
        run_virtual(program, 2)


def test_a_collective_moves_while_its_rank_waits_for_a_message() -> None:
    """Rank 1 sends only after the all-reduce, which rank 0 has started but not waited for."""

    def program(group: AbstractGroup) -> float:
        group = MessageGroup(group, AlgorithmChoice("ring"))
        total, token = torch.ones(6), torch.zeros(1)
        work = group.start(AllReduce(total))
        if group.rank == 0:
            group.recv(token, 1)
            work.wait()
        else:
            work.wait()
            if group.rank == 1:
                group.send(token, 0)
        return float(total.sum())

    assert run_virtual(program, 3).results == (18.0,) * 3


def test_closing_the_group_ends_what_is_under_way() -> None:
    """To wait for it used to raise a ValueError of the list of collectives."""

    def program(group: AbstractGroup) -> bool:
        messages = MessageGroup(group, AlgorithmChoice("ring"))
        if group.rank == 0:
            work = messages.start(AllReduce(torch.ones(6)))
            messages.close()
            for _ in range(2):
                with pytest.raises(UsageError, match="closed while"):
                    work.wait()
            return work.is_done()
        return True

    assert run_virtual(program, 2).results == (True, True)


def test_probe_finds_the_alpha_and_beta_of_the_network() -> None:
    network = NetworkModel(Link(alpha=2e-5, beta=1e-9))
    fits = run_virtual(probe, 3, network=network).results
    assert all(fit == fits[0] for fit in fits)
    assert fits[0].alpha == pytest.approx(2e-5, rel=1e-6) and fits[0].beta == pytest.approx(1e-9, rel=1e-6)
    assert fits[0].worst_error < 1e-6


def test_probe_needs_two_ranks() -> None:
    with pytest.raises(UsageError, match="two ranks"):
        probe(SoloGroup())
