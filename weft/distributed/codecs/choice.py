"""From the compression that a plan names to the codec of a rank."""

from dataclasses import replace

from weft.distributed.codecs.codec import AbstractCodec
from weft.specs.loading import load
from weft.specs.plan import Choice, value_of
from weft.specs.roles import Channel

__all__ = ["make_codec"]


def make_codec(choice: Choice, channel: Channel = "all_reduce", *, rank: int = 0) -> AbstractCodec:
    """A codec of one rank, with a memory of its own.

    Args:
        rank: whose it is, where a codec rounds by chance: the errors of ranks are independent. That of a replica, whose
            ranks hold some tensors alike.
    """
    given = replace(
        choice, parameters=tuple({**value_of("compress", choice).parameters, **dict(choice.parameters)}.items())
    )
    codec: AbstractCodec = load(value_of("compress", choice).realised_by[channel])(given, rank)
    return codec
