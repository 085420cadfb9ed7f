"""A place among processes that somebody started: on this machine or others, in real time."""

from pathlib import Path
from typing import final

from weft.distributed.group.group import AbstractGroup
from weft.distributed.mailbox import AbstractMailbox
from weft.distributed.place.launch import Launch, find_launch
from weft.distributed.place.open_group import open_group
from weft.distributed.place.open_mailbox import open_launched_mailbox
from weft.distributed.place.place import AbstractPlace
from weft.distributed.place.topology import with_topology
from weft.specs import Plan
from weft.training.optimizers import AbstractOptimizer

__all__ = ["LaunchedPlace"]


@final
class LaunchedPlace(AbstractPlace):
    """One process of a run; by default the one that the environment tells of."""

    def __init__(self, launch: Launch | None = None) -> None:
        super().__init__({})
        self.launch = launch or find_launch()

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
        group = open_group(self.launch)
        try:
            return with_topology(group, plan, self.launch.local_size)
        except BaseException:
            group.close()
            raise

    def open_mailbox(self, plan: Plan, address: int) -> AbstractMailbox:
        return open_launched_mailbox(self.launch, address=address, known=range(plan.roles.num_addresses))

    def charge_updates(self, optimizer: AbstractOptimizer, fraction: float) -> AbstractOptimizer:
        return optimizer

    def mark_joined(self) -> None:
        """The launcher, if it is Weft's, finds a file."""
        if self.launch.launcher == "weft":
            (Path(self.launch.meeting) / f"joined-{self.rank}").touch()
