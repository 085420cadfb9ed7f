"""Where hosts meet, all on loopback."""

import socket
from collections.abc import Callable

import pytest

from weft.engines.rendezvous import Rendezvous


@pytest.fixture
def rendezvous() -> Callable[..., Rendezvous]:
    """Of the host with this number, at a port that was free."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return lambda host, num_hosts=2, timeout=30.0: Rendezvous("127.0.0.1", port, host, num_hosts, timeout)
