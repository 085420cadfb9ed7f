"""The handshake: two peers prove to each other that they know the run's secret, without sending it.

    caller                                                  called
      hello:     who calls whom, nonce      ------------>
                                            <------------   challenge: nonce, HMAC(secret, "called", hello, nonce)
      proof:     HMAC(secret, "caller", hello, challenge) ->
                                            <------------   WELCOME, the first frame

Both nonces go into every proof and into the two keys of the session, one for each direction, so nothing of an earlier
session is of any use in a later one. All parts have fixed sizes: nobody can make us allocate.
"""

import asyncio
import hmac
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct

from weft.distributed.mailbox.sockets.frames import HEAD_BYTES, VERSION, Kind, RefusedError, check_head, unpack_head
from weft.errors import UsageError

__all__ = [
    "CHALLENGE_BYTES",
    "HELLO_BYTES",
    "PROOF_BYTES",
    "Hello",
    "NoAnswerError",
    "Session",
    "answer_handshake",
    "make_fingerprint",
    "make_proof",
    "start_handshake",
]

MAGIC = b"weft-mailbox"
FROM_CALLER, FROM_CALLED = b"from caller", b"from called"  # the keys of a session, one for each direction
NONCE_BYTES = 32
PROOF_BYTES = 32
_HELLO = Struct(f"<{len(MAGIC)}sBB4Q{NONCE_BYTES}s")
HELLO_BYTES = _HELLO.size
CHALLENGE_BYTES = NONCE_BYTES + PROOF_BYTES
MAX_NUMBER = 2**63
WELCOME_SECONDS = 5.0  # at least: an earlier incarnation of this peer has to end before


class NoAnswerError(Exception):
    """The other side says nothing, or hung up before it said anything: it may answer when it is called again."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Who calls whom: addresses and incarnations; and whether bodies are to be signed."""

    address: int
    incarnation: int
    to: int
    to_incarnation: int
    signs_bodies: bool

    def pack(self) -> bytes:
        numbers = (self.address, self.incarnation, self.to, self.to_incarnation)
        return _HELLO.pack(MAGIC, VERSION, self.signs_bodies, *numbers, secrets.token_bytes(NONCE_BYTES))


@dataclass(frozen=True, slots=True)
class Session:
    """The result of a handshake."""

    peer: int
    incarnation: int
    send_key: bytes
    receive_key: bytes
    signs_bodies: bool
    num_read: int = 0  # frames that have come already


async def start_handshake(connection: socket.socket, hello: Hello, secret: bytes, timeout: float) -> Session | None:
    """The caller's side, over a connection that does not block; None where the other side hung up.

    Raises:
        NoAnswerError: there was no challenge in time.
        UsageError: the other side does not know the secret.
    """
    send, words = asyncio.get_running_loop().sock_sendall, hello.pack()
    try:
        async with asyncio.timeout(timeout):
            await send(connection, words)
            challenge = await _read(connection, CHALLENGE_BYTES)
    except (OSError, EOFError):
        raise NoAnswerError from None
    nonce, proof = challenge[:NONCE_BYTES], challenge[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _sign(secret, b"called", words + nonce)):
        raise UsageError(f"peer does not know the secret of this run (peer: {hello.to}); give the same secret to all")
    send_key, receive_key = (_sign(secret, role, words + challenge) for role in (FROM_CALLER, FROM_CALLED))
    try:
        async with asyncio.timeout(max(timeout, WELCOME_SECONDS)):
            await send(connection, make_proof(secret, words, challenge))
            welcome = await _read(connection, HEAD_BYTES)
        head = unpack_head(welcome, 0, 0)
        check_head(receive_key, welcome, b"")
    except (OSError, EOFError, RefusedError):
        return None
    if head.kind is not Kind.WELCOME:
        return None
    return Session(hello.to, hello.to_incarnation, send_key, receive_key, hello.signs_bodies, num_read=1)


async def answer_handshake(connection: socket.socket, secret: bytes, check: Callable[[Hello], None]) -> Session:
    """The called side; the first frame that it sends completes the handshake.

    Args:
        check: raises RefusedError for a caller that knows the secret and still may not come in.

    Raises:
        RefusedError, OSError, EOFError: the caller is refused, or hung up.
    """
    words = await _read(connection, HELLO_BYTES)
    hello = _unpack_hello(words)
    nonce = secrets.token_bytes(NONCE_BYTES)
    challenge = nonce + _sign(secret, b"called", words + nonce)
    await asyncio.get_running_loop().sock_sendall(connection, challenge)
    proof = await _read(connection, PROOF_BYTES)
    if not hmac.compare_digest(proof, make_proof(secret, words, challenge)):
        raise RefusedError("unauthenticated")
    check(hello)
    send_key, receive_key = (_sign(secret, role, words + challenge) for role in (FROM_CALLED, FROM_CALLER))
    return Session(hello.address, hello.incarnation, send_key, receive_key, hello.signs_bodies)


async def _read(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = await asyncio.get_running_loop().sock_recv(connection, num_bytes - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def make_fingerprint(secret: bytes) -> str:
    """Tells, in the directory, that two peers know the same secret; a challenge gives away as much."""
    return _sign(secret, b"fingerprint", b"").hex()


def make_proof(secret: bytes, hello: bytes, challenge: bytes) -> bytes:
    return _sign(secret, b"caller", hello + challenge)


def _unpack_hello(raw: bytes) -> Hello:
    """Raises RefusedError for anything else."""
    magic, version, signs_bodies, address, incarnation, to, to_incarnation, _ = _HELLO.unpack(raw)
    if magic != MAGIC:
        raise RefusedError("malformed")
    if version != VERSION:
        raise RefusedError("version")
    if signs_bodies > 1 or max(address, incarnation, to, to_incarnation) >= MAX_NUMBER:
        raise RefusedError("malformed")
    return Hello(address, incarnation, to, to_incarnation, bool(signs_bodies))


def _sign(secret: bytes, role: bytes, words: bytes) -> bytes:
    # No role begins as another does up to its zero, and under each role the rest has one fixed length.
    return hmac.digest(secret, role + b"\0" + words, "sha256")
