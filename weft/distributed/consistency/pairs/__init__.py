"""Gossip over the mailbox, whose peers may be slow or die: in pairs (AD-PSGD), or with all neighbours that are left."""

from weft.distributed.consistency.pairs.desk import keep_desk
from weft.distributed.consistency.pairs.events import NOBODY, Deal, Event, Look, Mean, Mix, Pair, Step
from weft.distributed.consistency.pairs.journal import Script, make_scripts, read_events, read_journals
from weft.distributed.consistency.pairs.protocol import desk_address
from weft.distributed.consistency.pairs.slot import Slot
from weft.distributed.consistency.pairs.worker import GossipReplicas, GossipSettings

__all__ = [
    "NOBODY",
    "Deal",
    "Event",
    "GossipReplicas",
    "GossipSettings",
    "Look",
    "Mean",
    "Mix",
    "Pair",
    "Script",
    "Slot",
    "Step",
    "desk_address",
    "keep_desk",
    "make_scripts",
    "read_events",
    "read_journals",
]
