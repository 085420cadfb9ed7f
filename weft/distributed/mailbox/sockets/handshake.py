"""How two peers prove to each other that they know the run's secret, without sending it.

    caller                                                  called
      hello:     who calls whom, nonce      ------------>
                                            <------------   challenge: nonce, HMAC(secret, "called", hello, nonce)
      proof:     HMAC(secret, "caller", hello, challenge) ->
                                            <------------   WELCOME, the first frame

Both nonces go into every proof and into the two keys of the session, one for each direction, so nothing of an earlier
session is of any use in a later one. All parts have fixed sizes: a stranger cannot make us allocate.
"""

import hmac
import secrets
from dataclasses import dataclass
from struct import Struct

from weft.distributed.mailbox.sockets.frames import VERSION, RefusedError

__all__ = [
    "CHALLENGE_BYTES",
    "HELLO_BYTES",
    "PROOF_BYTES",
    "Hello",
    "Keys",
    "check_challenge",
    "check_proof",
    "make_challenge",
    "make_mark",
    "make_proof",
    "session_keys",
    "unpack_hello",
]

MAGIC = b"weft-mailbox"
NONCE_BYTES = 32
PROOF_BYTES = 32
_HELLO = Struct(f"<{len(MAGIC)}sBB4Q{NONCE_BYTES}s")
HELLO_BYTES = _HELLO.size
CHALLENGE_BYTES = NONCE_BYTES + PROOF_BYTES
MAX_NUMBER = 2**63


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
class Keys:
    """Of one session, as one side uses them."""

    send: bytes
    receive: bytes


def unpack_hello(raw: bytes) -> Hello:
    """Raises RefusedError for what is not the beginning of a session."""
    magic, version, signs_bodies, address, incarnation, to, to_incarnation, _ = _HELLO.unpack(raw)
    if magic != MAGIC:
        raise RefusedError("malformed")
    if version != VERSION:
        raise RefusedError("version")
    if signs_bodies > 1 or max(address, incarnation, to, to_incarnation) >= MAX_NUMBER:
        raise RefusedError("malformed")
    return Hello(address, incarnation, to, to_incarnation, bool(signs_bodies))


def make_mark(secret: bytes) -> str:
    """What tells, in the roll, that two peers know the same secret; a challenge gives away as much."""
    return _sign(secret, b"roll", b"").hex()


def make_challenge(secret: bytes, hello: bytes) -> bytes:
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + _sign(secret, b"called", hello + nonce)


def check_challenge(secret: bytes, hello: bytes, challenge: bytes) -> bool:
    nonce, proof = challenge[:NONCE_BYTES], challenge[NONCE_BYTES:]
    return hmac.compare_digest(proof, _sign(secret, b"called", hello + nonce))


def make_proof(secret: bytes, hello: bytes, challenge: bytes) -> bytes:
    return _sign(secret, b"caller", hello + challenge)


def check_proof(secret: bytes, hello: bytes, challenge: bytes, proof: bytes) -> bool:
    return hmac.compare_digest(proof, make_proof(secret, hello, challenge))


def session_keys(secret: bytes, hello: bytes, challenge: bytes, *, is_caller: bool) -> Keys:
    out = _sign(secret, b"from caller", hello + challenge)
    back = _sign(secret, b"from called", hello + challenge)
    return Keys(out, back) if is_caller else Keys(back, out)


def _sign(secret: bytes, role: bytes, words: bytes) -> bytes:
    # No role begins as another does up to its zero, and under each role the rest has one fixed length.
    return hmac.digest(secret, role + b"\0" + words, "sha256")
