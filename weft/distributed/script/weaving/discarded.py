"""Gradients that a script throws away after they were exchanged, where a codec has kept a part of them back.

net_d(net_g(noise)).mean().backward()     gradients of net_d are exchanged too, and what was not sent of them waits
opt_g.step()
opt_d.zero_grad()                         they are thrown away; what waits is not
net_d(...).backward()                     and comes with the next ones
"""

import warnings
from collections.abc import Iterable, Mapping
from typing import final

from torch import Tensor

from weft.distributed.codecs import AbstractCodec
from weft.distributed.script.weaving.dtensors import local_of

__all__ = ["DiscardedGradients"]


@final
class DiscardedGradients:
    """Warns of the first that it sees.

    Args:
        codec: of the exchanges.
        told_as: the plan's word for it.
        updated: names of the parameters that optimizers update: nobody misses what is thrown away of others.
        is_first: whether this is the rank that speaks for all.
    """

    def __init__(self, codec: AbstractCodec, told_as: str, updated: Iterable[str], *, is_first: bool) -> None:
        self._codec = codec
        self._told_as = told_as
        self._updated = frozenset(updated)
        self._is_awake = is_first
        self._versions: dict[str, int] = {}  # of gradients, as the last exchange has left them
        self.is_in_closure = False
        """A step is under way whose closure calls backward: it uses all that it clears."""

    def note(self, gradients: Mapping[str, Tensor | None]) -> None:
        """As an exchange has left them."""
        if self._is_awake:
            self._versions |= {name: grad._version for name, grad in gradients.items() if grad is not None}

    def look(self, gradients: Mapping[str, Tensor | None]) -> None:
        """When the next one begins.

        Args:
            gradients: those now there that were exchanged before, and that no step has used since.
        """
        if not self._is_awake or self.is_in_closure:
            return
        gone = [name for name in self._updated.intersection(gradients) if self._is_gone(name, gradients[name])]
        kept = {key.partition("/")[2] for key, one in self._codec.memory().items() if one.kind == "sum"} if gone else ()
        name = min((name for name in gone if name in kept), default=None)
        if name is None:
            return
        self._is_awake = False
        warnings.warn(
            "gradients were thrown away after their exchange, and what was not sent of them comes with later ones "
            f"(parameter: {name}, compress={self._told_as}); freeze a model while another trains, by "
            "requires_grad_(False), or use compress=bf16 or qsgd(8)",
            stacklevel=2,
        )

    def _is_gone(self, name: str, gradient: Tensor | None) -> bool:
        """A gradient may be 0 because nothing of it was sent; one that was cleared has been written to."""
        return gradient is None or (gradient._version != self._versions.get(name) and not local_of(gradient).any())
