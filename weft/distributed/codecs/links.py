"""The link between the ranks of a group, measured once: what decisions about messages go by."""

from weakref import WeakKeyDictionary

from weft.distributed.collectives.probe import probe
from weft.distributed.group.group import AbstractGroup
from weft.planning.cluster import Link

__all__ = ["link_of"]

SIZES = (8, 4096, 65_536, 262_144)
"""Bytes of messages: on a line of 100 Mbit/s the largest takes 20 ms."""

_links: WeakKeyDictionary[AbstractGroup, Link] = WeakKeyDictionary()


def link_of(group: AbstractGroup) -> Link:
    """Between the first rank and the last, which are on different hosts where any are. The first time it is a
    collective call: all ranks get the same answer."""
    if group not in _links:
        _links[group] = probe(group, peers=(0, group.size - 1), sizes=SIZES, num_warm_ups=1, num_repeats=3).link
    return _links[group]
