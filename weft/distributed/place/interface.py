"""The network interface through which a rank reaches ranks of other hosts: the one on the route to where they meet."""

import ipaddress
import os
import socket
from contextlib import suppress

from weft.distributed.mailbox import find_host
from weft.distributed.place.launch import Launch
from weft.errors import UsageError

__all__ = ["INTERFACE_VARIABLE", "find_interface", "find_route"]

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "lo"
ANY_PORT = 9  # nothing is sent


def find_interface(launch: Launch) -> str | None:
    """The one that GLOO_SOCKET_IFNAME names, loopback on one host, else the one on the route to the meeting.

    None where that cannot be told: the ranks have met by other means, or their meeting has a name which on this host
    means loopback, as many hosts know themselves; others could not reach this rank there.
    """
    if named := os.environ.get(INTERFACE_VARIABLE, "").partition(",")[0]:
        return named
    if launch.is_one_host:
        return LOOPBACK
    address = launch.meeting.rpartition(":")[0] if launch.launcher in ("torchrun", "hosts") else ""
    if not address:
        return None
    found = find_route(address)
    return None if found == LOOPBACK and not _is_loopback(address) else found


def find_route(address: str) -> str | None:
    """The interface from which packets to an address or a host's name leave, or which has that address itself.

    >>> find_route("127.0.0.1")
    'lo'
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, ANY_PORT))  # chooses a route; a datagram socket sends nothing for it
        except OSError:
            return None
        own = str(probe.getsockname()[0])
    if _is_loopback(own):
        return LOOPBACK
    for _, name in socket.if_nameindex():
        with suppress(UsageError):  # it has no address
            if find_host(name) == own:
                return name
    return None


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
