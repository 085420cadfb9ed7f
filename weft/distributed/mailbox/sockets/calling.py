"""The caller's side: listening sockets, and connections to those who came before."""

import fcntl
import ipaddress
import secrets
import socket
import struct

from weft.distributed.mailbox.sockets.frames import HEAD_BYTES, Kind, RefusedError, check_head, unpack_head
from weft.distributed.mailbox.sockets.handshake import (
    CHALLENGE_BYTES,
    Hello,
    check_challenge,
    make_proof,
    session_keys,
)
from weft.distributed.mailbox.sockets.link import Session
from weft.errors import UsageError

__all__ = [
    "NoAnswerError",
    "call",
    "connect",
    "endpoint_of",
    "find_host",
    "is_loopback",
    "listen_here",
    "listen_on",
    "prepare",
]

BACKLOG = 512
WELCOME_SECONDS = 5.0  # at least: an earlier life of this peer has to end before
_SIOCGIFADDR = 0x8915


class NoAnswerError(Exception):
    """Whoever was called says nothing, or hung up before it said anything: it may answer when it is called again."""


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


def listen_on(host: str) -> socket.socket:
    """A TCP socket on one address and a free port; never on all interfaces."""
    if ipaddress.IPv4Address(host).is_unspecified:
        raise UsageError(f"mailbox would listen on all interfaces (host: {host}); name one of them")
    return socket.create_server((host, 0), backlog=BACKLOG)


def listen_here() -> socket.socket:
    """A socket of this machine under a name that goes when the process does."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0weft-mailbox-{secrets.token_hex(16)}")
    listener.listen(BACKLOG)
    return listener


def endpoint_of(listener: socket.socket) -> str:
    """How others reach a listening socket, as text."""
    name = listener.getsockname()
    return name.decode() if isinstance(name, bytes) else f"{name[0]}:{name[1]}"


def connect(endpoint: str, timeout: float) -> socket.socket:
    """Open a connection. Raises OSError where nobody listens."""
    if endpoint.startswith("\0"):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout)
        try:
            connection.connect(endpoint)
        except OSError:
            connection.close()
            raise
        return connection
    host, _, port = endpoint.rpartition(":")
    return prepare(socket.create_connection((host, int(port)), timeout))


def prepare(connection: socket.socket) -> socket.socket:
    """Small frames leave at once."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def call(connection: socket.socket, hello: Hello, secret: bytes) -> Session | None:
    """The caller's side of the handshake, over a connection that blocks; None where the other side hung up.

    Raises:
        NoAnswerError: there was no challenge.
        UsageError: whoever was called does not know the secret.
    """
    words = hello.pack()
    try:
        connection.sendall(words)
        challenge = _read(connection, CHALLENGE_BYTES)
    except (OSError, EOFError):
        raise NoAnswerError from None
    try:
        if not check_challenge(secret, words, challenge):
            raise UsageError(
                f"peer does not know the secret of this run (peer: {hello.to}); give the same secret to all"
            )
        connection.sendall(make_proof(secret, words, challenge))
        connection.settimeout(max(connection.gettimeout() or 0.0, WELCOME_SECONDS))
        keys = session_keys(secret, words, challenge, is_caller=True)
        welcome = _read(connection, HEAD_BYTES)
        head = unpack_head(welcome, 0, 0)
        check_head(keys.receive, welcome, b"")
    except (OSError, EOFError, RefusedError):
        return None
    if head.kind is not Kind.WELCOME:
        return None
    return Session(hello.to, hello.to_incarnation, keys, hello.signs_bodies, num_read=1)


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = connection.recv(num_bytes - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
