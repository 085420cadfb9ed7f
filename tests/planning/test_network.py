"""The network model: times by hand, contention at each kind of link, and the fit."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import UsageError
from weft.planning.cluster import ClusterSpec, Link
from weft.planning.network import LinkSchedule, NetworkFit, NetworkModel, SlowPair, Transfer, fit_alpha_beta, network_of

FLAT = NetworkModel(Link(alpha=1.0, beta=0.5))
HOSTS = NetworkModel(Link(alpha=1.0, beta=0.5), inside=Link(alpha=0.25, beta=0.125), ranks_per_host=2)


def test_one_message_takes_alpha_and_beta() -> None:
    assert LinkSchedule(FLAT, 2).transfer(0, 1, 10, moment=2.0) == Transfer(sent=7.0, received=8.0)
    assert LinkSchedule(FLAT, 2).transfer(0, 1, 0, moment=2.0) == Transfer(sent=2.0, received=3.0)


def test_a_port_sends_one_message_after_the_other_and_is_full_duplex() -> None:
    links = LinkSchedule(FLAT, 3)
    assert links.transfer(0, 1, 10, 0.0).received == 6.0
    assert links.transfer(0, 2, 10, 0.0).received == 11.0
    assert links.transfer(1, 0, 10, 0.0).received == 6.0


def test_messages_inside_a_host_are_cheaper_and_leave_shared_links_alone() -> None:
    links = LinkSchedule(replace(HOSTS, host_beta=0.5, backbone_beta=0.5), 4)
    assert links.transfer(0, 1, 8, 0.0).received == 1.25
    assert links.transfer(2, 3, 8, 0.0).received == 1.25


def test_ranks_of_a_host_share_its_line() -> None:
    links = LinkSchedule(replace(HOSTS, host_beta=0.5), 4)
    assert links.transfer(0, 2, 8, 0.0).received == 5.0
    assert links.transfer(1, 3, 8, 0.0).received == 9.0
    free = LinkSchedule(HOSTS, 4)
    assert [free.transfer(0, 2, 8, 0.0).received, free.transfer(1, 3, 8, 0.0).received] == [5.0, 5.0]


def test_all_hosts_share_the_backbone() -> None:
    links = LinkSchedule(replace(HOSTS, backbone_beta=0.25), 8)
    arrivals = [links.transfer(source, source + 4, 8, 0.0).received for source in range(4)]
    # Each enters when the one before has passed, 2 s later; then 4 s through its own port, and 1 s of latency.
    assert arrivals == [5.0, 7.0, 9.0, 11.0]


def test_a_slow_pair_is_slow_in_one_direction() -> None:
    links = LinkSchedule(replace(FLAT, slow=(SlowPair(0, 1, 3.0),)), 2)
    assert links.transfer(0, 1, 2, 0.0).received == 6.0
    assert links.transfer(1, 0, 2, 0.0).received == 2.0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(0, 99)), max_size=30))
def test_no_message_beats_its_own_cost_and_a_link_never_carries_two(messages: list[tuple[int, int, int]]) -> None:
    links = LinkSchedule(FLAT, 4)
    bytes_out = [0] * 4
    for source, distance, num_bytes in messages:
        transfer = links.transfer(source, (source + distance) % 4, num_bytes, 0.0)
        bytes_out[source] += num_bytes
        assert transfer.received >= FLAT.between.seconds(num_bytes)
        assert transfer.sent >= bytes_out[source] * FLAT.between.beta - 1e-9


def test_the_network_of_a_cluster() -> None:
    cluster = ClusterSpec(("a", "b"), 2, inside=Link(1e-6, 1e-10), between=Link(1e-5, 1e-9), gamma=1e-10)
    model = network_of(cluster)
    assert (model.link(0, 1), model.link(1, 2)) == (cluster.inside, cluster.between)
    assert (model.host_beta, model.gamma, model.host_of(3)) == (1e-9, 1e-10, 1)


@given(alpha=st.floats(1e-7, 1e-3), beta=st.floats(1e-11, 1e-8))
def test_the_fit_finds_a_line_and_withstands_disturbed_times(alpha: float, beta: float) -> None:
    sizes = [8, 1024, 16_384, 131_072, 1_048_576, 8_388_608, 16_777_216]
    times = [alpha + size * beta for size in sizes]
    times[3] *= 10
    fitted = fit_alpha_beta(sizes, times)
    assert fitted == pytest.approx((alpha, beta), rel=1e-3)


def test_the_fit_never_goes_below_zero_and_refuses_too_little() -> None:
    alpha, beta = fit_alpha_beta([1, 2, 3], [1e-6, 3e-6, 5e-6])
    assert alpha >= 0 and beta >= 0
    for sizes, times in (([8], [1.0]), ([8, 8], [1.0, 1.0]), ([8, 16], [0.0, 1.0])):
        with pytest.raises(UsageError, match="two message sizes"):
            fit_alpha_beta(sizes, times)
    assert NetworkFit((10, 20), (1.0, 2.0), alpha=0.0, beta=0.11).worst_error == pytest.approx(0.1)


def test_a_network_without_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match="no ranks"):
        LinkSchedule(FLAT, 0)
