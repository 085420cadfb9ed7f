"""Gossip over the mailbox, whose peers may be slow or die: in pairs (AD-PSGD), or with all neighbours that are left."""

from weft.distributed.consistency.pairs.events import (
    NOBODY,
    Deal,
    Event,
    Look,
    Mean,
    Mix,
    Pair,
    ReplayPlan,
    Step,
    make_replay_plans,
    read_journal,
    read_journals,
)
from weft.distributed.consistency.pairs.protocol import responder_address
from weft.distributed.consistency.pairs.responder import respond
from weft.distributed.consistency.pairs.weights import SharedWeights
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
    "ReplayPlan",
    "SharedWeights",
    "Step",
    "make_replay_plans",
    "read_journal",
    "read_journals",
    "respond",
    "responder_address",
]
