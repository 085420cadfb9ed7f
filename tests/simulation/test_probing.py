"""The probe of a cluster: fits from real ranks, and the choices that follow from them."""

import pytest

from weft.distributed.place import Launch
from weft.errors import UsageError
from weft.planning.cluster import ClusterSpec, Link
from weft.simulation.probing import ClusterProbe, probe_cluster, seconds_per_byte_reduced, table_of_choices

CLUSTER = ClusterSpec(("a", "b"), 4, inside=Link(1e-6, 1e-10), between=Link(1e-4, 1e-9), gamma=1e-10)


@pytest.mark.slow
def test_two_ranks_are_probed_inside_the_host_and_over_sockets() -> None:
    found = probe_cluster(2)
    assert isinstance(found, ClusterProbe)
    assert (len(found.cluster.hosts), found.cluster.ranks_per_host) == (1, 2)
    assert found.cluster.inside == found.inside.link != found.between.link == found.cluster.between
    assert found.inside.sizes == found.between.sizes
    assert all(seconds > 0 for fit in (found.inside, found.between) for seconds in fit.times)
    assert found.cluster.gamma > 0


def test_one_rank_cannot_be_probed() -> None:
    with pytest.raises(UsageError, match=r"ranks: 1.*--workers 2"):
        probe_cluster(1)


def test_ranks_that_exist_are_joined_and_the_first_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = {"sizes": [8, 16], "times": [1.0, 2.0], "alpha": 0.5, "beta": 0.25}
    found = {"hosts": ["a"], "ranks_per_host": 2, "inside": fit, "between": fit, "gamma": 0.125}
    monkeypatch.setattr("weft.simulation.probing.probe_rank", lambda: found)
    told = []
    for rank in range(2):
        place = Launch("torchrun", rank, 2, "h:1", 2)
        monkeypatch.setattr("weft.simulation.probing.find_launch", lambda place=place: place)
        told.append(probe_cluster(7))
    assert told[0] is not None and told[0].cluster == ClusterSpec(("a",), 2, Link(0.5, 0.25), Link(0.5, 0.25), 0.125)
    assert told[1] is None


def test_choices_take_the_link_that_the_ranks_would_use() -> None:
    near, far = table_of_choices(CLUSTER, (4, 8), (8,))
    assert near.seconds < 1e-4 < far.seconds


def test_small_messages_take_few_rounds_and_large_ones_few_bytes() -> None:
    small, large = table_of_choices(CLUSTER, (8,), (1024, 1 << 30))
    assert (small.algorithm, large.algorithm) == ("hierarchical(4,halving)", "hierarchical(4)")


def test_reducing_takes_time() -> None:
    assert 0 < seconds_per_byte_reduced(num_repeats=3) < 1e-6
