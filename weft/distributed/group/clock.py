"""The clock beside a group: real seconds, or the virtual cluster's."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import final

__all__ = ["AbstractClock", "RealClock", "VirtualTimes"]


class AbstractClock(ABC):
    """Seconds as a rank sees them."""

    @abstractmethod
    def now(self) -> float: ...

    @abstractmethod
    def charge(self, seconds: float) -> None:
        """Computation that took this long: nothing to do where it really did, an advance where time is virtual."""

    @abstractmethod
    def wait_until(self, moment: float) -> None: ...


@final
class RealClock(AbstractClock):
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def charge(self, seconds: float) -> None:
        pass

    def wait_until(self, moment: float) -> None:
        remaining = moment - time.monotonic()
        if remaining > 0:
            time.sleep(remaining)


@dataclass(frozen=True)
class VirtualTimes:
    """How long computation takes on a rank whose own takes no time.

    Args:
        layers: seconds, or shares of a pass, of the layers that have these parameters; None where a pass is charged by
            the sizes of parameters.
        probe: lets the time of a small computation pass.
    """

    layers: Callable[[Iterable[str]], float] | None
    probe: Callable[[], None]
