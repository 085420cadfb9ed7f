"""Ranks that torchrun starts on this machine."""

import sys
from pathlib import Path
from typing import final

from weft.engines.command import CommandRanks, start_command
from weft.engines.engine import AbstractEngine
from weft.engines.local import threads_per_rank

__all__ = ["TorchrunEngine"]


@final
class TorchrunEngine(AbstractEngine):
    """Starts ranks by `python -m torch.distributed.run`."""

    def start(self, folder: Path, num_ranks: int) -> CommandRanks:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command = [*launcher, "--nproc-per-node", str(num_ranks)]
        threads = threads_per_rank(num_ranks)
        return start_command(command, folder, num_ranks, variable="RANK", num_threads=threads)
