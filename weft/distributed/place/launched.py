"""A place among processes that somebody started: on this machine or others, in real time."""

from dataclasses import replace
from pathlib import Path
from typing import final

import torch

from weft.distributed.group.group import AbstractGroup
from weft.distributed.group.liveness import Store
from weft.distributed.mailbox import AbstractMailbox
from weft.distributed.place.devices import open_for_device, prepare_device
from weft.distributed.place.launch import Launch, find_launch
from weft.distributed.place.open_group import open_group, open_store, open_world
from weft.distributed.place.open_mailbox import open_launched_mailbox
from weft.distributed.place.place import AbstractPlace
from weft.specs import CPU, Plan, find_device
from weft.training.optimizers import AbstractOptimizer

__all__ = ["LaunchedPlace"]


@final
class LaunchedPlace(AbstractPlace):
    """One process of a run; by default the one that the environment tells of, on the CPU.

    Args:
        silence: seconds after which a rank that takes no part in a call counts as lost. One that is dead is known at
            once; those of a script may compute alone for long.
    """

    def __init__(self, launch: Launch | None = None, device: torch.device = CPU, *, silence: float = 300.0) -> None:
        super().__init__({}, device)
        self.launch = launch or find_launch()
        self._silence = silence

    def on(self, wish: str) -> "LaunchedPlace":
        """This place on the device that a wish means for it, as `find_device` tells; the process is set up for it."""
        device = find_device(wish, self.launch.local_rank)
        prepare_device(device)
        return self.with_device(device)

    def with_device(self, device: torch.device) -> "LaunchedPlace":
        return LaunchedPlace(self.launch, device, silence=self._silence)

    @property
    def rank(self) -> int:
        return self.launch.rank

    @property
    def size(self) -> int:
        return self.launch.size

    @property
    def patience(self) -> float:
        return 3600.0

    @property
    def snapshots(self) -> Path | None:
        return Path(self.launch.meeting) if self.launch.launcher == "weft" else None

    def size_for(self, plan: Plan) -> int:
        return plan.roles.num_processes

    def addresses(self, plan: Plan) -> tuple[int, ...]:
        return plan.roles.processes[self.rank]

    def open_group(self, plan: Plan) -> AbstractGroup:
        group = open_group(self.launch, timeout=self._silence)
        try:
            return open_for_device(self.launch, group, plan, self.device)
        except BaseException:
            group.close()
            raise

    def open_world(self, num_ranks: int) -> AbstractGroup | None:
        return open_world(self.launch, num_ranks, self._silence)

    def open_ranks(self, plan: Plan) -> AbstractGroup | None:
        group = open_world(self.launch, plan.num_ranks, self._silence, "ranks")
        if group is None:
            return None
        return open_for_device(replace(self.launch, size=plan.num_ranks), group, plan, self.device)

    def open_notes(self) -> Store | None:
        return open_store(self.launch, self.patience) if self.size > 1 else None

    def open_mailbox(self, plan: Plan, address: int) -> AbstractMailbox:
        return open_launched_mailbox(self.launch, address=address, known=range(plan.roles.num_addresses))

    def charge_updates(self, optimizer: AbstractOptimizer, fraction: float) -> AbstractOptimizer:
        return optimizer

    def mark_joined(self) -> None:
        """The launcher, if it is Weft's, finds a file."""
        if self.launch.launcher == "weft":
            (Path(self.launch.meeting) / f"joined-{self.rank}").touch()
