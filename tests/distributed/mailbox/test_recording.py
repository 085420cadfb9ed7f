"""What passes through a mailbox is counted, by peer and tag."""

import torch

from weft.distributed.mailbox import LocalTransport, MessageCount, RecordingMailbox


def test_messages_and_bytes_are_counted_by_peer_and_tag() -> None:
    transport = LocalTransport()
    server, worker = RecordingMailbox(transport.open(0)), RecordingMailbox(transport.open(1))
    server.follow_peers()
    for step in range(3):
        worker.send(0, "push", {"step": step}, [torch.ones(5), torch.ones(2, dtype=torch.int64)])
    worker.send(0, "pull")
    assert worker.traffic.sent == {(0, "push"): MessageCount(3, 108, 30), (0, "pull"): MessageCount(1, 0, 2)}
    assert server.traffic.received == {}
    for _ in range(5):
        receive = server.start_receive()
        receive.wait()
        receive.wait()
    assert server.traffic.received == {(1, tag): tally for (_, tag), tally in worker.traffic.sent.items()}
    assert worker.traffic.sent_under("push") == MessageCount(3, 108, 30)
    assert worker.traffic.sent_under("weights") == MessageCount()
    for mailbox in (worker, server):
        mailbox.close()
