"""Ranks of torch's DDP over Gloo, of which one sleeps: model, batches and rates are those of Weft's."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.stragglers.sleepy import SLEEP, SLOW_RANK
from weft.distributed.place import find_launch
from weft.training.build import build_splits, build_task, derive_seed
from weft.training.component import build
from weft.training.datasets import AbstractDataset
from weft.training.models import MODELS
from weft.training.recipe import Recipe
from weft.training.sampling import share

__all__ = ["train_ddp_rank"]


def train_ddp_rank(recipe: dict[str, Any], folder: str, seed: int) -> tuple[float, float]:
    """The rank program: seconds from the first step to the target, infinite where it was missed, and test accuracy."""
    chosen, place = Recipe.from_dict(recipe), find_launch()
    torch.set_num_threads(1)
    splits = build_splits(chosen)
    task, state = build_task(chosen, splits, seed)  # for its sampler and its schedule
    assert chosen.fixed.target is not None
    torch.manual_seed(derive_seed(seed, "model"))
    module: nn.Module = build(chosen.fixed.model, MODELS, "model", splits.task)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=place.rank, world_size=place.size)
    network = DistributedDataParallel(module)
    naps = _Naps()
    if place.rank == SLOW_RANK:
        network.register_comm_hook(naps, _sleep_and_reduce)
    optimizer = torch.optim.Adam(network.parameters())
    sampler, samples, evaluated, seconds = state.sampler, 0, 0, float("inf")
    began = time.perf_counter()
    while samples < task.total_samples:
        indices, after = task.sampler.next_batch(sampler)
        batch = splits.train.take(share(indices, place.rank, place.size), sampler.epoch)
        optimizer.param_groups[0]["lr"] = task.optimizer.lr * task.schedule(samples)
        naps.began = time.perf_counter()
        optimizer.zero_grad()
        (labels,) = batch.targets
        nn.functional.cross_entropy(network(*batch.inputs), labels).backward()
        optimizer.step()
        sampler, samples = after, samples + len(indices)
        if samples - evaluated >= task.evaluate_every:
            evaluated = samples
            is_met = torch.tensor(place.rank == 0 and accuracy(module, splits.validation) >= chosen.fixed.target.bound)
            dist.broadcast(is_met, 0)
            if is_met:
                seconds = time.perf_counter() - began
                break
    score = accuracy(module, splits.test) if place.rank == 0 else 0.0
    dist.destroy_process_group()
    return seconds, score


class _Naps:
    """When the computation of this step began."""

    began = 0.0


def _sleep_and_reduce(naps: _Naps, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A model this small is one bucket, which is there when the computation has ended."""
    assert bucket.is_last()
    time.sleep(SLEEP * (time.perf_counter() - naps.began))
    assert dist.group.WORLD is not None
    return allreduce_hook(dist.group.WORLD, bucket)


@torch.no_grad()
def accuracy(module: nn.Module, data: AbstractDataset) -> float:
    module.eval()
    batch = data.take(torch.arange(len(data)))
    (labels,) = batch.targets
    hits = module(*batch.inputs).argmax(1) == labels
    module.train()
    return float(hits.double().mean())
