"""A script whose ranks fall out of step in the way that its argument names: some ways on all ranks at once, which tells
and goes on, and in the end one in which ranks wait for each other."""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.distributed.script.world.world import find_world
from weft.errors import OutOfStepError

RANK = find_world().rank
ALONE_SECONDS = 2.5  # longer than the watchdog has patience


def make(width: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, width)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loader_of(num_samples: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(num_samples, 4)), 4)


def weave_different_models() -> None:
    weft.weave(*make(2 + RANK), loader_of(16))


def mean_or_gather() -> None:
    if RANK == 0:
        weft.mean(1.0)
    else:
        weft.gather(1.0)


def mean_in_two_places() -> None:
    if RANK == 0:
        weft.mean(1.0)
    else:
        weft.mean(2.0)


def iterate_different_lengths() -> None:
    for _ in weft.weave(*make(), loader_of(16 + 4 * RANK))[2]:
        pass


def tell(act: Callable[[], None]) -> None:
    try:
        act()
    except OutOfStepError as error:
        print(f"[{act.__name__}] {error}", flush=True)


def main(way: str) -> None:
    if way == "batches":
        for act in (weave_different_models, mean_or_gather, mean_in_two_places, iterate_different_lengths):
            tell(act)
    model, optimizer, loader = weft.weave(*make(), loader_of(16))
    for index, (x,) in enumerate(loader):
        if way == "break" and RANK == 1 and index == 2:
            break
        if way == "exit" and RANK == 1 and index == 2:
            sys.exit(0)
        model(x).mean().backward()
        optimizer.step()
        if way == "batches" and RANK == 0 and index == 1:
            time.sleep(ALONE_SECONDS)  # evaluates alone, and the others wait in the next backward
    print("all ranks have been through an epoch", flush=True)
    for _ in range(3 + RANK):  # batches of its own, of which rank 1 has one more
        model(torch.ones(2, 4)).mean().backward()
    weft.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
