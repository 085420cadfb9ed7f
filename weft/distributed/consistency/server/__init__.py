"""Parameter servers: shards that workers push to and pull from, each at its own pace."""

from weft.distributed.consistency.server.arrival import Arrival
from weft.distributed.consistency.server.cut import Piece, cut_evenly
from weft.distributed.consistency.server.decisions import Commit, Decision, Drop, Join, Leave, Release
from weft.distributed.consistency.server.host import HostSpec, serve_host
from weft.distributed.consistency.server.joins import Joins
from weft.distributed.consistency.server.journal import Summary, read_decisions, read_summary
from weft.distributed.consistency.server.policy import NEVER, AbstractPolicy
from weft.distributed.consistency.server.protocol import host_address, server_address
from weft.distributed.consistency.server.rounds import Rounds
from weft.distributed.consistency.server.script import Script
from weft.distributed.consistency.server.server import serve
from weft.distributed.consistency.server.settings import Settings, make_policy, settings_of
from weft.distributed.consistency.server.shard import Contribution, Shard
from weft.distributed.consistency.server.spring import spring
from weft.distributed.consistency.server.training import ServerSpec
from weft.distributed.consistency.server.worker import ServedReplicas

__all__ = [
    "NEVER",
    "AbstractPolicy",
    "Arrival",
    "Commit",
    "Contribution",
    "Decision",
    "Drop",
    "HostSpec",
    "Join",
    "Joins",
    "Leave",
    "Piece",
    "Release",
    "Rounds",
    "Script",
    "ServedReplicas",
    "ServerSpec",
    "Settings",
    "Shard",
    "Summary",
    "cut_evenly",
    "host_address",
    "make_policy",
    "read_decisions",
    "read_summary",
    "serve",
    "serve_host",
    "server_address",
    "settings_of",
    "spring",
]
