"""Two test hosts for all tests of a file."""

from collections.abc import Iterator

import pytest

from benchmarks.hosts import Hosts, can_make_hosts, make_hosts


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if reason := can_make_hosts():
        pytest.skip(f"no test hosts: {reason}")
    with make_hosts(2, "1gbit") as made:
        yield made
