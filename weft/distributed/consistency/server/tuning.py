"""Optimizers at servers whose settings workers change on the way."""

from abc import abstractmethod

from weft.training.optimizers import AbstractOptimizer

__all__ = ["AbstractTunedOptimizer"]


class AbstractTunedOptimizer(AbstractOptimizer):
    """The optimizer of one shard, in the place of one that every worker has."""

    @abstractmethod
    def tune(self, settings: str | None) -> None:
        """Before an update: what the worker that pushed has set in its own, as text; None for nothing."""
