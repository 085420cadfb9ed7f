"""Addresses of sockets: where a mailbox listens, and how others reach it."""

import asyncio
import fcntl
import ipaddress
import secrets
import socket
import struct

from weft.errors import UsageError

__all__ = ["connect", "endpoint_of", "find_host", "is_loopback", "listen_tcp", "listen_unix", "send_at_once"]

BACKLOG = 512
_SIOCGIFADDR = 0x8915


def find_host(interface: str) -> str:
    """The IPv4 address of a network interface, such as `lo` or `eth0`; an address is taken as it is.

    >>> find_host("lo"), find_host("10.0.0.7")
    ('127.0.0.1', '10.0.0.7')
    """
    try:
        return str(ipaddress.IPv4Address(interface))
    except ValueError:
        pass
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise UsageError(f"interface has no address (interface: {interface}); use one of {names}") from None
    return socket.inet_ntoa(answer[20:24])


def is_loopback(host: str) -> bool:
    return ipaddress.IPv4Address(host).is_loopback


def listen_tcp(host: str) -> socket.socket:
    """A socket on one address and a free port; never on all interfaces."""
    if ipaddress.IPv4Address(host).is_unspecified:
        raise UsageError(f"mailbox would listen on all interfaces (host: {host}); name one of them")
    return socket.create_server((host, 0), backlog=BACKLOG)


def listen_unix() -> socket.socket:
    """A socket of this machine under a name that goes when the process does."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0weft-mailbox-{secrets.token_hex(16)}")
    listener.listen(BACKLOG)
    return listener


def endpoint_of(listener: socket.socket) -> str:
    """How others reach a listening socket, as text."""
    name = listener.getsockname()
    return name.decode() if isinstance(name, bytes) else f"{name[0]}:{name[1]}"


async def connect(endpoint: str) -> socket.socket:
    """Open a connection that does not block. Raises OSError: BlockingIOError where the listener's queue is full."""
    is_unix = endpoint.startswith("\0")
    connection = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        if is_unix:
            connection.connect(endpoint)
        else:
            host, _, port = endpoint.rpartition(":")
            await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
            send_at_once(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def send_at_once(connection: socket.socket) -> None:
    """Let small frames leave without waiting for more."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
