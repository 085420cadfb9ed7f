"""What is split among ranks: data so far."""

from weft.distributed.placement.all_reduce import AllReduceExchange
from weft.distributed.placement.carry_out import carry_out
from weft.distributed.placement.data_parallel import DataParallel
from weft.distributed.placement.exchange import AbstractExchange
from weft.distributed.placement.server import ServerExchange

__all__ = ["AbstractExchange", "AllReduceExchange", "DataParallel", "ServerExchange", "carry_out"]
