"""Parameter servers: shards that workers push to and pull from, each at its own pace."""

from weft.distributed.consistency.server.arrival import Arrival
from weft.distributed.consistency.server.decisions import (
    Commit,
    Decision,
    Drop,
    Join,
    Leave,
    Release,
    Summary,
    read_decisions,
    read_summary,
)
from weft.distributed.consistency.server.host import HostSpec, serve_host
from weft.distributed.consistency.server.policies import make_policy
from weft.distributed.consistency.server.policy import NEVER, AbstractPolicy
from weft.distributed.consistency.server.replay import JoinPolicy, ReplayPolicy
from weft.distributed.consistency.server.rounds import Rounds
from weft.distributed.consistency.server.server import serve
from weft.distributed.consistency.server.settings import Settings, settings_of
from weft.distributed.consistency.server.shard import Contribution, Shard
from weft.distributed.consistency.server.shard_state import ServerSpec
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
    "JoinPolicy",
    "Leave",
    "Release",
    "ReplayPolicy",
    "Rounds",
    "ServedReplicas",
    "ServerSpec",
    "Settings",
    "Shard",
    "Summary",
    "make_policy",
    "read_decisions",
    "read_summary",
    "serve",
    "serve_host",
    "settings_of",
]
