"""What must not come in: every refusal is counted, the caller is hung up on, and the server goes on serving."""

import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.distributed.mailbox import contract
from tests.distributed.mailbox.peers import run_sockets
from tests.distributed.mailbox.sockets.by_hand import SECRET, connect, make_receiver, shake_hands
from weft.distributed.mailbox import LEFT, AbstractMailbox
from weft.distributed.mailbox.sockets import FolderDirectory, Member, open_mailbox
from weft.distributed.mailbox.sockets import connections as connections_module
from weft.distributed.mailbox.sockets import frames as frames_module
from weft.distributed.mailbox.sockets import joining as joining_module
from weft.distributed.mailbox.sockets import mailbox as mailbox_module
from weft.distributed.mailbox.sockets.connection import Connection
from weft.distributed.mailbox.sockets.endpoints import find_host, listen_tcp
from weft.distributed.mailbox.sockets.frames import (
    BODY_MAC_BYTES,
    HEAD_BYTES,
    Kind,
    digest_body,
    pack_head,
    pack_meta,
    sign_body,
)
from weft.distributed.mailbox.sockets.handshake import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    Hello,
    Session,
    make_fingerprint,
    make_proof,
)
from weft.errors import DeadlineError, PeerLostError, UsageError

META = pack_meta("push", b'{"step":1}', [torch.ones(2)])
BODY = bytes(8)


class Scene:
    """A server at address 0, and raw connections to it."""

    def __init__(self, folder: Path) -> None:
        self.directory = FolderDirectory(folder)
        self.connections: list[socket.socket] = []
        known = range(4)
        self.server = open_mailbox("tcp", self.directory, 0, secret=SECRET, known=known, max_bytes=10_000)
        self.server.follow_peers()

    def connect(self) -> socket.socket:
        connection = connect(self.directory)
        self.connections.append(connection)
        return connection

    def enter(self, address: int = 1, incarnation: int = 5) -> tuple[socket.socket, Session]:
        """A peer with the right secret that speaks by hand."""
        connection = self.connect()
        session = shake_hands(connection, Hello(address, incarnation, 0, 0, signs_bodies=False))
        assert session is not None
        return connection, session

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self.server.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.close()


def is_hung_up(connection: socket.socket) -> bool:
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def check_still_serving(scene: Scene) -> None:
    peer = open_mailbox("tcp", scene.directory, 3, secret=SECRET)
    peer.send(0, "push", {"step": 2})
    peer.close()
    assert scene.server.receive("push", 3, deadline=scene.server.clock.now() + 10).header == {"step": 2}


def message(session: Session, sequence: int = 0, meta: bytes = META, body_bytes: int = 8) -> bytes:
    return pack_head(session.send_key, Kind.MESSAGE, sequence, meta, body_bytes) + meta + BODY


HELLO = Hello(1, 5, 0, 0, signs_bodies=False)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (b"GET / HTTP/1.1\r\n" * 9, "malformed"),
        (pickle.dumps({"a": list(range(200))})[:HELLO_BYTES], "malformed"),
        (HELLO.pack()[:12] + b"\x63" + HELLO.pack()[13:], "version"),
        (HELLO.pack()[:13] + b"\x07" + HELLO.pack()[14:], "malformed"),
        (b"\x00" * HELLO_BYTES, "malformed"),
        (HELLO.pack() + bytes(PROOF_BYTES), "unauthenticated"),
    ],
    ids=["http", "pickle", "version", "flag", "zeros", "proof"],
)
def test_strangers_are_sent_away(scene: Scene, words: bytes, reason: str) -> None:
    connection = scene.connect()
    connection.sendall(words)
    assert is_hung_up(connection)
    assert scene.server.refusals() == {reason: 1}
    check_still_serving(scene)


def test_one_who_hangs_up_during_the_handshake_is_counted(scene: Scene) -> None:
    connection = scene.connect()
    connection.sendall(HELLO.pack())
    connection.recv(CHALLENGE_BYTES)
    connection.shutdown(socket.SHUT_WR)
    assert is_hung_up(connection)
    assert scene.server.refusals() == {"unauthenticated": 1}


def test_a_peer_with_another_secret_is_refused_and_told(scene: Scene) -> None:
    with pytest.raises(UsageError, match=r"does not know the secret of this run \(peer: 0\)"):
        open_mailbox("tcp", scene.directory, 1, secret=bytes(32))
    check_still_serving(scene)
    assert scene.server.refusals() == {"unauthenticated": 1}


def test_a_recorded_session_cannot_be_played_again(scene: Scene) -> None:
    hello, first, second = HELLO.pack(), scene.connect(), scene.connect()
    first.sendall(hello)
    proof = make_proof(SECRET, hello, first.recv(CHALLENGE_BYTES))
    first.sendall(proof)
    assert len(first.recv(HEAD_BYTES)) == HEAD_BYTES
    second.sendall(hello)
    second.recv(CHALLENGE_BYTES)
    second.sendall(proof)
    assert is_hung_up(second)
    assert scene.server.refusals() == {"unauthenticated": 1}
    assert scene.server.peers() == {1: 5}


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (Hello(9, 5, 0, 0, signs_bodies=False), "unknown peer"),
        (Hello(0, 5, 0, 0, signs_bodies=False), "unknown peer"),
        (Hello(1, 5, 2, 0, signs_bodies=False), "misdirected"),
        (Hello(1, 5, 0, 7, signs_bodies=False), "misdirected"),
    ],
)
def test_a_peer_that_is_not_one_of_the_run_is_refused(scene: Scene, hello: Hello, reason: str) -> None:
    assert shake_hands(scene.connect(), hello) is None
    assert scene.server.refusals() == {reason: 1}
    check_still_serving(scene)


@pytest.mark.parametrize("incarnation", [4, 5])
def test_an_earlier_life_is_too_late(scene: Scene, incarnation: int) -> None:
    connection, _ = scene.enter(1, incarnation=5)
    assert shake_hands(scene.connect(), Hello(1, incarnation, 0, 0, signs_bodies=False)) is None
    assert scene.server.refusals() == {"late": 1}
    assert scene.server.peers() == {1: 5}
    connection.close()


def test_a_later_life_takes_over_from_one_that_hangs_on(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_module, "LINGER_SECONDS", 0.05)
    scene.enter(1, incarnation=5)
    scene.enter(1, incarnation=6)
    assert scene.server.peers() == {1: 6}
    note = scene.server.receive(LEFT, deadline=scene.server.clock.now() + 10)
    assert (note.incarnation, note.header["reason"]) == (5, "it was replaced")


def flip(frame: bytes, at: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]


Spoil = Callable[[Session], bytes]


def with_meta(meta: bytes, body_bytes: int = 8) -> Spoil:
    return lambda session: message(session, meta=meta, body_bytes=body_bytes)


SPOILT: dict[str, Spoil] = {
    "disordered": lambda session: message(session, 1),
    "version": lambda session: flip(message(session), 4),
    "oversized": lambda session: message(session, body_bytes=10_001),
    "oversized meta": lambda session: pack_head(session.send_key, Kind.MESSAGE, 0, bytes(400_000), 0),
    "forged meta": lambda session: flip(message(session), HEAD_BYTES + 3),
    "forged head": lambda session: flip(message(session), HEAD_BYTES - 1),
    "malformed magic": lambda session: flip(message(session), 0),
    "malformed kind": lambda session: message(session)[:5] + b"\x63" + message(session)[6:],
    "malformed pickle": with_meta(pickle.dumps([["push", [], None], {}]), 0),
    "malformed type": with_meta(b'[["push",[["complex64",1]],[]],{}]'),
    "malformed size": with_meta(b'[["push",[["float32",3]],[]],{}]'),
    "malformed length": with_meta(b'[["push",[["float32",-2]],[]],{}]'),
    "malformed number": with_meta(b'[["push",[["float32",2.0]],[]],{}]'),
    "malformed truth": with_meta(b'[["push",[["float64",true]],[]],{}]'),
    "malformed header": with_meta(b'[["push",[["float32",2]],[]],[]]'),
    "malformed nan": with_meta(b'[["push",[["float32",2]],[]],{"a":NaN}]'),
    "malformed tag": with_meta(b'[[7,[["float32",2]],[]],{}]'),
    "malformed note": with_meta(b'[["weft.left",[["float32",2]],[]],{"reason":"x"}]'),
    "malformed block": with_meta(b'[["push",[["float32",2]],[1,2]],{}]', 0),
    "malformed offset": with_meta(b'[["push",[["float32",2]],[1,"x"]],{}]', 0),
    "malformed list": with_meta(b'[["push",[["float32",2]],[1]],{}]', 0),
    "malformed depth": with_meta(b"[" * 50_000, 0),
    "malformed text": with_meta(b"\xff\xfe", 0),
    "malformed release": lambda session: pack_head(session.send_key, Kind.RELEASE, 0, b"7", 0) + b"7",
}


@pytest.mark.parametrize("fault", SPOILT)
def test_spoilt_frames_end_their_connection(scene: Scene, fault: str) -> None:
    connection, session = scene.enter()
    connection.sendall(SPOILT[fault](session))
    assert is_hung_up(connection)
    reason = fault.split()[0]
    note = scene.server.receive(LEFT, 1)
    assert (scene.server.refusals(), note.header["reason"]) == ({reason: 1}, f"what it sent was refused: {reason}")
    assert scene.server.poll("push") is None
    check_still_serving(scene)


def test_a_frame_that_comes_twice_is_taken_once(scene: Scene) -> None:
    connection, session = scene.enter()
    connection.sendall(2 * message(session))
    assert is_hung_up(connection)
    assert scene.server.receive("push").header == {"step": 1}
    assert scene.server.poll("push") is None
    assert scene.server.refusals() == {"replayed": 1}


@pytest.mark.parametrize("num_bytes", [1, HEAD_BYTES, HEAD_BYTES + 5, HEAD_BYTES + len(META) + 3])
def test_a_frame_that_breaks_off_is_refused(scene: Scene, num_bytes: int) -> None:
    connection, session = scene.enter()
    ready = scene.server.start_receive("push", 1, into=[torch.zeros(2)])
    connection.sendall(message(session)[:num_bytes])
    connection.close()
    note = scene.server.receive(LEFT, 1)
    assert (scene.server.refusals(), note.header) == ({"truncated": 1}, {"reason": "it died"})
    with pytest.raises(PeerLostError, match="peer 1 is lost"):
        ready.wait()
    check_still_serving(scene)


def test_a_connection_that_ends_between_frames_is_no_fault(scene: Scene) -> None:
    connection, session = scene.enter()
    connection.sendall(message(session))
    connection.close()
    assert scene.server.receive(LEFT, 1).header == {"reason": "it died"}
    assert (scene.server.refusals(), scene.server.receive("push").tag) == ({}, "push")


def test_a_silent_peer_is_named(tmp_path: Path) -> None:
    directory = FolderDirectory(tmp_path)
    server = open_mailbox("tcp", directory, 0, secret=SECRET, timeout=0.2)
    server.follow_peers()
    with connect(directory) as connection:
        assert shake_hands(connection, Hello(1, 5, 0, 0, signs_bodies=False)) is not None
        note = server.receive(LEFT, deadline=server.clock.now() + 10)
    assert (note.source, note.header["reason"]) == (1, "silent for 0.2 s")
    server.close()


def test_strangers_who_say_nothing_do_not_pile_up(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining_module, "MAX_HANDSHAKES", 2)
    crowd = [scene.connect() for _ in range(3)]
    assert is_hung_up(crowd[2])
    assert scene.server.refusals() == {"crowded": 1}


def test_strangers_who_say_nothing_are_sent_away_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining_module, "HANDSHAKE_SECONDS", 0.01)
    scene = Scene(tmp_path)
    assert is_hung_up(scene.connect())
    assert scene.server.refusals() == {"unauthenticated": 1}
    scene.close()


def test_a_peer_with_an_address_of_nobody_is_told_so(scene: Scene) -> None:
    with pytest.raises(UsageError, match="address is not one of the run's"):
        open_mailbox("tcp", scene.directory, -1, secret=SECRET)
    with pytest.raises(UsageError, match="address is not one of the run's"):
        open_mailbox("tcp", scene.directory, 4, secret=SECRET, known=range(4))


def signed(session: Session, body: bytes) -> bytes:
    head = pack_head(session.send_key, Kind.MESSAGE, 0, META, len(body))
    return head + META + body + sign_body(session.send_key, head, digest_body([memoryview(BODY)]))


@pytest.mark.parametrize("is_damaged", [False, True])
def test_bodies_are_signed_where_one_side_wishes(scene: Scene, is_damaged: bool) -> None:
    connection = scene.connect()
    session = shake_hands(connection, Hello(1, 5, 0, 0, signs_bodies=True))
    assert session is not None
    ready = scene.server.start_receive("push", 1, into=[torch.ones(2)])
    connection.sendall(signed(session, flip(BODY, 3) if is_damaged else BODY))
    if is_damaged:
        assert is_hung_up(connection)
        assert scene.server.refusals() == {"forged": 1}
        with pytest.raises(PeerLostError, match="refused: forged"):
            ready.wait()
    else:
        assert ready.wait().tensors[0].tolist() == [0.0, 0.0]


def genuine_frames(session: Session, *numbers: float) -> list[bytes]:
    """What a peer writes to say these numbers, one in each message."""
    near, far = socket.socketpair()
    receiver = make_receiver(1, 5)
    connection = Connection(near, session, receiver, max_bytes=10_000, bodies=None, on_blocked=lambda _: None)
    frames = []
    for number in numbers:
        connection.send_message("push", b"{}", (torch.tensor([number]),))
        frames.append(far.recv(4096))
    near.close()
    far.close()
    return frames


@pytest.mark.parametrize("is_spliced", [False, True])
def test_a_signed_body_belongs_to_its_frame(scene: Scene, is_spliced: bool) -> None:
    """Once, an older body with its own MAC was taken under a later head of the same size."""
    connection = scene.connect()
    session = shake_hands(connection, Hello(1, 5, 0, 0, signs_bodies=True))
    assert session is not None
    first, second = genuine_frames(session, 1.0, 2.0)
    end = 4 + BODY_MAC_BYTES
    connection.sendall(first + second[:-end] + (first if is_spliced else second)[-end:])
    assert scene.server.receive("push", 1).tensors[0].tolist() == [1.0]
    if is_spliced:
        assert is_hung_up(connection)
        assert scene.server.refusals() == {"forged": 1}
        assert scene.server.poll("push") is None
    else:
        assert scene.server.receive("push", 1).tensors[0].tolist() == [2.0]


def test_beyond_loopback_every_body_is_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox_module, "is_loopback", lambda host: False)
    scene = Scene(tmp_path)
    assert shake_hands(scene.connect(), Hello(1, 5, 0, 0, signs_bodies=False)) is None
    assert scene.server.refusals() == {"unsigned": 1}
    check_still_serving(scene)
    contract.check_kind(contract.payloads, run_sockets, 2)
    scene.close()


def test_a_receive_that_is_cancelled_half_way_gives_its_tensors_back(scene: Scene) -> None:
    """Once, the rest of the message was written over what the caller had put there meanwhile."""
    connection, session = scene.enter()
    ready = torch.zeros(2000)
    meta, body = pack_meta("push", b"{}", [ready]), torch.ones(2000).numpy().tobytes()
    asked = scene.server.start_receive("push", 1, into=[ready])
    connection.sendall(pack_head(session.send_key, Kind.MESSAGE, 0, meta, len(body)) + meta + body[:4000])
    while float(ready[999]) != 1.0:
        os.sched_yield()
    with pytest.raises(DeadlineError, match="waited for: 1"):
        asked.wait(scene.server.clock.now())
    asked.cancel()
    ready.fill_(7.0)
    connection.sendall(body[4000:])
    (tensor,) = scene.server.receive("push", 1).tensors
    assert torch.equal(tensor, torch.ones(2000))
    assert torch.equal(ready, torch.full((2000,), 7.0))


def test_a_signed_body_is_judged_before_its_tensors_are_given_back(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, what the caller wrote after it had cancelled was taken for a forgery, and the peer was dropped."""
    connection = scene.connect()
    session = shake_hands(connection, Hello(1, 5, 0, 0, signs_bodies=True))
    assert session is not None
    ready = torch.zeros(2)
    asked = scene.server.start_receive("push", 1, into=[ready])

    def take_back() -> None:
        asked.cancel()
        ready.fill_(7.0)

    taker = threading.Thread(target=take_back)

    def slow_digest(rows: Sequence[memoryview]) -> bytes:
        taker.start()
        taker.join(0.1)  # as long as it takes to do harm; it waits for this to end
        return digest_body(rows)

    monkeypatch.setattr(frames_module, "digest_body", slow_digest)
    connection.sendall(signed(session, BODY))
    assert scene.server.receive("push", 1, deadline=scene.server.clock.now() + 10).tensors[0].tolist() == [0.0, 0.0]
    taker.join()
    assert (scene.server.refusals(), ready.tolist()) == ({}, [7.0, 7.0])


def test_a_port_that_somebody_else_has_by_now_is_no_peer(scene: Scene, tmp_path: Path) -> None:
    """Once, a mailbox could not open where another run had the port of a peer that was killed."""
    other, here = scene.directory.read(0), FolderDirectory(tmp_path / "here")
    assert other is not None
    here.join(Member(0, other.endpoint, fingerprint=make_fingerprint(bytes(32))))
    mailbox = open_mailbox("tcp", here, 1, secret=bytes(32))
    assert (mailbox.peers(), mailbox.refusals()) == ({}, {"unauthenticated": 1})
    mailbox.close()


def test_only_one_interface_is_listened_on() -> None:
    with pytest.raises(UsageError, match="all interfaces"):
        listen_tcp("0.0.0.0")
    with pytest.raises(UsageError, match="interface has no address"):
        find_host("weft9")
    listener = listen_tcp(find_host("lo"))
    assert listener.getsockname()[0] == "127.0.0.1"
    listener.close()


def test_entries_of_peers_that_are_gone_are_passed_over(tmp_path: Path) -> None:
    directory = FolderDirectory(tmp_path)
    listener = listen_tcp("127.0.0.1")
    closed = f"127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    directory.join(Member(0, closed))
    directory.join(Member(2, closed, has_left=True))
    mailbox: AbstractMailbox = open_mailbox("tcp", directory, 1, secret=SECRET)
    assert (mailbox.peers(), mailbox.incarnation) == ({}, 2)
    mailbox.close()
    member = directory.read(2)
    assert member is not None and member.has_left
