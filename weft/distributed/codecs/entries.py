"""The memory of a codec as entries of a checkpoint.

codec/residual/w    a sum: for another number of ranks each takes an equal part of what all had not sent
codec/factor/w      the same on all ranks
codec/messages/w    the same on all ranks: how many messages began with this tensor
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from weft.distributed.codecs.codec import AbstractCodec
from weft.training.checkpoint import CODEC, Cut, Entry

__all__ = ["entries_of", "remember_entries"]


def entries_of(
    codec: AbstractCodec, parameters: Mapping[str, Tensor], cut_of: Callable[[str], Cut | None]
) -> dict[str, Entry]:
    """The memory of a rank's codec. Nothing of a factor whose matrix lies in parts on several ranks: it is the factor
    of one part, and a draw does as well.

    Args:
        codec: of this rank.
        parameters: whose gradients it sends.
        cut_of: the part of a gradient that this rank has, as placements say.
    """
    found: dict[str, Entry] = {}
    for key, kept in codec.memory().items():
        use, _, name = key.partition("/")
        cut = cut_of(f"gradient/{name}") if name else None
        if use == "factor" or not kept.tensor.dim():  # a count of messages is of the whole tensor
            if cut is None or use != "factor":
                found[CODEC + key] = Entry(kept.tensor, kept.kind)
            continue
        shape = cut.held_shape if cut is not None else parameters[name].shape if name in parameters else None
        tensor = kept.tensor
        if shape is not None and shape != tensor.shape and tensor.numel() == parameters[name].numel():
            tensor = tensor.view(shape)
        found[CODEC + key] = Entry.of_part(tensor, kept.kind, cut)
    return found


def remember_entries(codec: AbstractCodec, entries: Mapping[str, Entry]) -> None:
    """Go on with what a checkpoint holds; nothing of it begins empty."""
    own = {name.removeprefix(CODEC): entry.tensor for name, entry in entries.items() if name.startswith(CODEC)}
    codec.remember(own)
