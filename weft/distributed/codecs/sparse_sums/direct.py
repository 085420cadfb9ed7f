"""Streams sent straight to their receivers, who do not know how long they are.

    rank 0                         rank 1
    [header][body .........  ==>   Recv(header), then Recv(body) of the length that it tells
    Recv(header) ...         <==   [header][body .........

All messages leave at once, headers before bodies, so an exchange costs one latency, not one for the length and one more
for the stream; a body without entries is not sent. Each rank begins with the peer after it: no two send to one rank
first.
"""

from collections.abc import Generator, Mapping

import torch
from torch import Tensor

from weft.distributed.codecs.sparse_sums.stream import SparseStream
from weft.distributed.codecs.sparse_sums.wire import HEADER_BYTES, body_bytes, has_body, read_stream, write_stream
from weft.distributed.group.calls import Call, Recv, Send

__all__ = ["SparseReduction", "exchange_streams", "peers_after"]

SparseReduction = Generator[Call | tuple[Call, ...], None, SparseStream]
"""A sparse sum under way: a reduction (`weft.distributed.codecs.Reduction`) that returns a stream."""


def exchange_streams(
    outgoing: Mapping[int, SparseStream], lengths: Mapping[int, int], like: Tensor, tag: int
) -> Generator[tuple[Call, ...], None, dict[int, SparseStream]]:
    """The streams that came, by their rank. Every rank of a group may send to some and receive from others.

    Args:
        outgoing: by the rank that they go to, in the order in which they leave.
        lengths: of the vectors that come here, by the rank that sends them.
        like: a tensor of the type and device of all values.
        tag: of the headers; that of the bodies is the next one.

    Raises:
        EncodingError: what came is no stream of such a length.
    """
    written = {id(stream): write_stream(stream) for stream in outgoing.values()}
    messages = {peer: written[id(stream)] for peer, stream in outgoing.items()}
    headers = {source: like.new_empty(HEADER_BYTES, dtype=torch.uint8) for source in lengths}
    sends = [Send(message[:HEADER_BYTES], peer, tag) for peer, message in messages.items()]
    sends += [Send(message[HEADER_BYTES:], peer, tag + 1) for peer, message in messages.items() if has_body(message)]
    if sends or headers:
        yield (*sends, *(Recv(header, source, tag) for source, header in headers.items()))
    arrivals = {}
    for source, header in headers.items():
        num_bytes = HEADER_BYTES + body_bytes(header, lengths[source], like.dtype)
        arrivals[source] = header.new_empty(num_bytes)
        arrivals[source][:HEADER_BYTES] = header
    bodies = {source: arrival[HEADER_BYTES:] for source, arrival in arrivals.items() if has_body(arrival)}
    if bodies:
        yield tuple(Recv(body, source, tag + 1) for source, body in bodies.items())
    return {source: read_stream(arrival, lengths[source], like.dtype) for source, arrival in arrivals.items()}


def peers_after(rank: int, size: int) -> list[int]:
    """All other ranks, the next one first.

    >>> peers_after(1, 4)
    [2, 3, 0]
    """
    return [(rank + step) % size for step in range(1, size)]
