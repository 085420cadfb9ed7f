"""What passes through a mailbox is counted, by peer and tag."""

import torch

from weft.distributed.mailbox import LocalPost, RecordingMailbox, Tally


def test_messages_and_bytes_are_counted_by_peer_and_tag() -> None:
    post = LocalPost()
    server, worker = RecordingMailbox(post.open(0)), RecordingMailbox(post.open(1))
    server.follow_peers()
    for step in range(3):
        worker.send(0, "push", {"step": step}, [torch.ones(5), torch.ones(2, dtype=torch.int64)])
    worker.send(0, "pull")
    assert worker.traffic.sent == {(0, "push"): Tally(3, 108, 30), (0, "pull"): Tally(1, 0, 2)}
    assert server.traffic.received == {}
    for _ in range(5):
        receive = server.start_receive()
        receive.wait()
        receive.wait()
    assert server.traffic.received == {(1, tag): tally for (_, tag), tally in worker.traffic.sent.items()}
    assert server.traffic.received_under("push") == worker.traffic.sent_under("push") == Tally(3, 108, 30)
    assert worker.traffic.received_under("push") == Tally()
    for mailbox in (worker, server):
        mailbox.close()


def test_windows_are_counted_too() -> None:
    post = LocalPost()
    owner, user = post.open(0), RecordingMailbox(post.open(1))
    owner.expose("weights", torch.zeros(10))
    window = user.window(0, "weights")
    window.put(torch.ones(4))
    window.accumulate(torch.ones(2), 8)
    window.get(torch.empty(10))
    assert user.traffic.sent == {(0, "window weights"): Tally(2, 24)}
    assert user.traffic.received == {(0, "window weights"): Tally(1, 40)}
    for mailbox in (user, owner):
        mailbox.close()
