"""`weft cluster probe`: the file it writes and the tables it prints; the ranks are played."""

from pathlib import Path
from typing import Any

import pytest

from weft.planning.cluster import ClusterSpec, Link, read_cluster
from weft.planning.network import NetworkFit
from weft.simulation.probing import ClusterProbe

INSIDE = NetworkFit((8, 1000), (1e-6, 2e-6), alpha=1e-6, beta=1e-9)
BETWEEN = NetworkFit((8, 1000), (1e-4, 1e-4), alpha=1e-4, beta=0.0)
CLUSTER = ClusterSpec(("here",), 2, Link(1e-6, 1e-9), Link(1e-4, 0.0), gamma=1e-10)


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many ranks were asked for."""
    asked: list[int] = []

    def probe(workers: int) -> ClusterProbe:
        asked.append(workers)
        return ClusterProbe(CLUSTER, INSIDE, BETWEEN)

    monkeypatch.setattr("weft.simulation.probing.probe_cluster", probe)
    return asked


def test_probe_writes_the_cluster_and_prints_the_fit(weft: Any, probed: list[int]) -> None:
    outcome = weft("cluster", "probe", "--workers", "3")
    assert (outcome.code, outcome.err, probed) == (0, "", [3])
    assert read_cluster(Path("cluster.toml")) == CLUSTER
    assert "inside a host   1.000 µs     1.000 GB/s" in outcome.out
    assert "over sockets    100.0 µs  no limit seen" in outcome.out
    assert "64 ranks" in outcome.out and "halving_doubling" in outcome.out
    assert outcome.out.endswith("cluster file: cluster.toml\n")


def test_json_tells_raw_times_and_choices(weft: Any, probed: list[int]) -> None:
    document = weft("cluster", "probe", "--json", "--out", "mine.toml").json
    assert document["path"] == "mine.toml" and Path("mine.toml").exists()
    assert document["probe"]["inside"]["times"] == [1e-6, 2e-6]
    assert {"num_ranks", "num_bytes", "algorithm", "seconds"} == set(document["choices"][0])


def test_ranks_other_than_the_first_tell_nothing(weft: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("weft.simulation.probing.probe_cluster", lambda _: None)
    outcome = weft("cluster", "probe")
    assert (outcome.code, outcome.out, list(tmp_path.iterdir())) == (0, "", [])


def test_one_rank_is_refused(weft: Any) -> None:
    assert weft("cluster", "probe", "--workers", "1").code == 2
