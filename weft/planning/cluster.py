"""The cluster as data: how many ranks, on which hosts, and what a message costs; kept in cluster.toml."""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft import atomic
from weft.errors import CorruptFileError, UsageError

__all__ = ["ClusterSpec", "Link", "read_cluster", "write_cluster"]


@dataclass(frozen=True)
class Link:
    """A message of n bytes takes `alpha + n * beta` seconds.

    >>> Link(alpha=1e-5, beta=1e-9).seconds(1_000_000)
    0.00101
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        if not (self.alpha >= 0 and self.beta >= 0):
            raise UsageError(
                f"link costs are negative (alpha: {self.alpha}, beta: {self.beta}); probe the cluster again"
            )

    def seconds(self, num_bytes: float) -> float:
        return self.alpha + num_bytes * self.beta


@dataclass(frozen=True)
class ClusterSpec:
    """Hosts of equally many ranks; `gamma` is the seconds that a rank takes to add one byte of a message."""

    hosts: tuple[str, ...]
    ranks_per_host: int
    inside: Link
    between: Link
    gamma: float = 0.0

    def __post_init__(self) -> None:
        if not self.hosts or self.ranks_per_host < 1:
            raise UsageError(
                f"cluster has no ranks (hosts: {len(self.hosts)}, ranks per host: {self.ranks_per_host}); "
                "name at least one host with one rank"
            )

    @property
    def num_ranks(self) -> int:
        return len(self.hosts) * self.ranks_per_host


def write_cluster(path: Path, cluster: ClusterSpec) -> None:
    """Write cluster.toml, whole or not at all."""
    # A JSON string of plain characters is also a TOML basic string, and repr(float) is a TOML float.
    hosts = ", ".join(json.dumps(host) for host in cluster.hosts)
    text = (
        "# Seconds per message (alpha), per byte sent (beta) and per byte reduced (gamma).\n"
        f"hosts = [{hosts}]\n"
        f"ranks_per_host = {cluster.ranks_per_host}\n"
        f"gamma = {float(cluster.gamma)!r}\n"
        f"\n[inside]\nalpha = {float(cluster.inside.alpha)!r}\nbeta = {float(cluster.inside.beta)!r}\n"
        f"\n[between]\nalpha = {float(cluster.between.alpha)!r}\nbeta = {float(cluster.between.beta)!r}\n"
    )
    atomic.write_text(path, text)


def read_cluster(path: Path) -> ClusterSpec:
    """Read what `write_cluster` wrote, or what a person wrote like it."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cluster file could not be read ({path}: {error.strerror}); run weft cluster probe") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"cluster file is not TOML ({path}: {error}); run weft cluster probe") from None
    try:
        return ClusterSpec(
            hosts=tuple(_of_type(host, str) for host in _of_type(table["hosts"], list)),
            ranks_per_host=_of_type(table["ranks_per_host"], int),
            inside=_link(table["inside"]),
            between=_link(table["between"]),
            gamma=_number(table.get("gamma", 0.0)),
        )
    except (KeyError, TypeError) as error:
        raise CorruptFileError(f"cluster file is not complete ({path}: {error}); run weft cluster probe") from None


def _link(table: Any) -> Link:
    return Link(_number(_of_type(table, dict)["alpha"]), _number(table["beta"]))


def _number(value: Any) -> float:
    return float(_of_type(value, (int, float)))


def _of_type(value: Any, wanted: type | tuple[type, ...]) -> Any:
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise TypeError(f"unexpected value {value!r}")
    return value
