"""Collectives written once on Send and Recv, so that they run on every group."""

from weft.distributed.collectives.choice import AlgorithmChoice, AlgorithmName, Fastest, choose
from weft.distributed.collectives.execution import CollectiveRounds, Round, perform
from weft.distributed.collectives.message_group import MessageGroup, start_rounds
from weft.distributed.collectives.moves import Action, Move, Schedule
from weft.distributed.collectives.probe import PROBED_SIZES, probe, probe_all_reduce, probe_network

__all__ = [
    "PROBED_SIZES",
    "Action",
    "AlgorithmChoice",
    "AlgorithmName",
    "CollectiveRounds",
    "Fastest",
    "MessageGroup",
    "Move",
    "Round",
    "Schedule",
    "choose",
    "perform",
    "probe",
    "probe_all_reduce",
    "probe_network",
    "start_rounds",
]
