"""From the compression that a plan names to the codec of a rank."""

from weft.distributed.codecs.codec import AbstractCodec
from weft.specs.loading import load
from weft.specs.plan import Choice, value_of
from weft.specs.roles import Channel

__all__ = ["make_codec"]


def make_codec(choice: Choice, channel: Channel = "all_reduce") -> AbstractCodec:
    """A codec of one rank, with a memory of its own."""
    codec: AbstractCodec = load(value_of("compress", choice).realised_by[channel])(choice)
    return codec
