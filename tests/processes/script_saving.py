"""What ranks run in tests of `weft.save`: they save twice, and one of them may be killed in the second."""

from torch import nn

import weft
from tests.processes.checkpoints import plant
from weft.distributed.script.world.world import find_world
from weft.errors import TrainingError


def save(folder: str, epochs: list[int], victim: int = -1, call: str = "", is_before: bool = False) -> str:
    """Save a model whose weights tell the epoch; the victim is killed in the last, before or after the call."""
    rank = find_world().rank
    model = nn.Linear(40, 50)
    try:
        for epoch in epochs:
            nn.init.constant_(model.weight, epoch)
            if rank == victim and epoch == epochs[-1]:
                plant(call, is_before)
            weft.save(folder, model=model, epoch=epoch, rank=rank)
    except TrainingError:
        return "lost"
    return "saved"
