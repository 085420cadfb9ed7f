"""cluster.toml: written whole, read back the same, refused where it is not one."""

from pathlib import Path

import pytest

from weft.errors import CorruptFileError, UsageError
from weft.planning.cluster import ClusterSpec, Link, read_cluster, write_cluster

CLUSTER = ClusterSpec(
    hosts=("node-1", 'quo"ted\\host', "ünï"),
    ranks_per_host=4,
    inside=Link(alpha=1.5e-6, beta=1e-10),
    between=Link(alpha=3e-5, beta=8.1e-10),
    gamma=2e-10,
)


def test_round_trip(tmp_path: Path) -> None:
    write_cluster(tmp_path / "cluster.toml", CLUSTER)
    assert read_cluster(tmp_path / "cluster.toml") == CLUSTER
    assert CLUSTER.num_ranks == 12


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ranks_per_host = 4", ""),
        ("ranks_per_host = 4", "ranks_per_host = true"),
        ("ranks_per_host = 4", 'ranks_per_host = "4"'),
        ("[between]", "[between"),
        ("alpha = 3e-05", ""),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "cluster.toml"
    write_cluster(path, CLUSTER)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(CorruptFileError, match="weft cluster probe"):
        read_cluster(path)


def test_a_missing_file_and_impossible_clusters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="could not be read"):
        read_cluster(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="no ranks"):
        ClusterSpec((), 1, CLUSTER.inside, CLUSTER.between)
    with pytest.raises(UsageError, match="negative"):
        Link(alpha=-1.0, beta=0.0)
    with pytest.raises(UsageError, match="negative"):
        Link(alpha=float("nan"), beta=0.0)
