"""Where ranks are: who a process is among those of a run, who started it, and how it reaches the others."""

from weft.distributed.place.launch import Launch, find_launch
from weft.distributed.place.launched import LaunchedPlace
from weft.distributed.place.meeting import has_met
from weft.distributed.place.open_group import Kind, open_group, open_store
from weft.distributed.place.open_mailbox import open_launched_mailbox
from weft.distributed.place.place import AbstractPlace
from weft.distributed.place.topology import with_topology

__all__ = [
    "AbstractPlace",
    "Kind",
    "Launch",
    "LaunchedPlace",
    "find_launch",
    "has_met",
    "open_group",
    "open_launched_mailbox",
    "open_store",
    "with_topology",
]
