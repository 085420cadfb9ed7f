"""The script that every host runs: train, and leave how long each step took and what went over the wire.

Started with `weft launch` it is woven. Otherwise RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as torchrun sets
them, and ranks train by DDP or each alone.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import weft
from benchmarks.compression.cases import Hook, parse_hook
from benchmarks.compression.workloads import BATCH_PER_RANK, WORKLOADS, Workload, accuracy_of

SEED = 5
FIRST_COMPRESSED = 2  # PowerSGD is dense before, which must be more than one step
ONE_BUCKET = 1 << 10  # MiB, more than any model here has
PATIENCE = 30.0
COUNTERS = Path("/sys/class/net/eth0/statistics")


@dataclass(frozen=True)
class Training:
    """A model that trains together with those of the other ranks, or alone.

    Args:
        agree: rank 0's value, on all ranks.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Iterable[Any]
    rank: int
    agree: Callable[[float], float]


def weave(model: nn.Module, optimizer: torch.optim.Optimizer, samples: TensorDataset, num_ranks: int) -> Training:
    order = torch.Generator().manual_seed(SEED)
    batch = BATCH_PER_RANK * num_ranks
    loader = DataLoader(samples, batch_size=batch, shuffle=True, generator=order, drop_last=True)
    model, optimizer, woven = weft.weave(model, optimizer, loader)
    return Training(model, optimizer, woven, weft.rank, lambda value: float(weft.broadcast(torch.tensor(value))))


def join(model: nn.Module, optimizer: torch.optim.Optimizer, samples: TensorDataset, hook: Hook | None) -> Training:
    """By DDP; or by nothing, where there is no hook: ranks only begin together."""
    dist.init_process_group("gloo")
    sampler: Any = DistributedSampler(samples, seed=SEED, drop_last=True)
    loader = DataLoader(samples, batch_size=BATCH_PER_RANK, sampler=sampler, drop_last=True)
    trained = model
    if hook is not None:
        # PowerSGD starts its second all-reduce when the first has ended, which of several buckets is in another order
        # on each rank: Gloo then ends the process. One bucket has one order.
        bucket = ONE_BUCKET if "powersgd" in hook.name else None
        trained = with_hook(DistributedDataParallel(model, bucket_cap_mb=bucket), hook)

    def agree(value: float) -> float:
        told = torch.tensor(value)
        dist.broadcast(told, 0)
        return float(told)

    return Training(trained, optimizer, loader, dist.get_rank(), agree)


def with_hook(model: DistributedDataParallel, hook: Hook) -> DistributedDataParallel:
    if hook.name in ("fp16", "bf16"):
        model.register_comm_hook(None, default_hooks.fp16_compress_hook if hook.name == "fp16" else compress_bf16)
    elif hook.name:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=hook.rank, start_powerSGD_iter=FIRST_COMPRESSED
        )
        is_batched = hook.name == "batched_powersgd"
        if is_batched:
            repair_batched()
        compress = powerSGD_hook.batched_powerSGD_hook if is_batched else powerSGD_hook.powerSGD_hook
        model.register_comm_hook(state, compress)
    return model


def compress_bf16(
    _state: Any,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP asks for this very annotation
) -> torch.futures.Future[Tensor]:
    """PyTorch's own, under a name of ours: DDP refuses that hook by its name where there is no NCCL, and Gloo carries
    it all the same."""
    return default_hooks.bf16_compress_hook(None, bucket)  # type: ignore[arg-type]


def repair_batched() -> None:
    """Batched PowerSGD of PyTorch 2.13 fails at its first compressed step: it gives one matrix to a function that was
    changed to take a stack of them. A stack of one makes it work, so that the peer is measured at all."""
    orthogonalise: Any = powerSGD_hook._orthogonalize

    def take_one_too(matrices: Tensor, epsilon: float = 0) -> None:
        orthogonalise(matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon)

    powerSGD_hook._orthogonalize = take_one_too


def batches(loader: Iterable[Any]) -> Iterator[Any]:
    """Epoch after epoch."""
    epoch = 0
    while True:
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def take_step(training: Training, workload: Workload, batch: Any) -> None:
    inputs, targets = batch
    training.optimizer.zero_grad()
    workload.loss(training.model(inputs), targets).backward()
    if workload.max_norm is not None:
        nn.utils.clip_grad_norm_(training.model.parameters(), workload.max_norm)
    training.optimizer.step()


def count_bytes() -> tuple[int, int]:
    """Sent and received by this host."""
    sent, received = (int((COUNTERS / f"{name}_bytes").read_text()) for name in ("tx", "rx"))
    return sent, received


def time_steps(training: Training, workload: Workload, warm_up: int, num_steps: int) -> dict[str, Any]:
    """Seconds of each step after the first ones, with no barrier between them, and bytes and processor time of all of
    them."""
    seconds = list[float]()
    before, busy = (0, 0), 0.0
    for number, batch in zip(range(warm_up + num_steps), batches(training.loader), strict=False):
        if number == warm_up:
            before, busy = count_bytes(), time.process_time()
        began = time.perf_counter()
        take_step(training, workload, batch)
        if number >= warm_up:
            seconds.append(time.perf_counter() - began)
    after = count_bytes()
    busy = time.process_time() - busy
    return {"seconds": seconds, "sent": after[0] - before[0], "received": after[1] - before[1], "processor": busy}


def train_to_target(training: Training, workload: Workload, test: TensorDataset, options: Any) -> dict[str, Any]:
    """Steps and seconds of training, evaluation excluded, until rank 0 has the accuracy on the test samples."""
    seconds, curve = 0.0, list[tuple[int, float, float]]()
    for number, batch in zip(range(1, options.steps + 1), batches(training.loader), strict=False):
        began = time.perf_counter()
        take_step(training, workload, batch)
        seconds += time.perf_counter() - began
        if number % options.evaluate_every == 0 or number == options.steps:
            accuracy = training.agree(accuracy_of(training.model, test) if training.rank == 0 else 0.0)
            curve.append((number, seconds, accuracy))
            if accuracy >= options.target:
                break
    steps, total, accuracy = curve[-1]
    is_there = accuracy >= options.target
    return {"is_there": is_there, "steps": steps, "train_seconds": total, "accuracy": accuracy, "curve": curve}


def leave(folder: Path, rank: int, num_ranks: int) -> None:
    """End a peer when all are through, without the end of its interpreter: DDP's destructor then waits for a thread of
    Gloo that waits for Python, in about one of ten runs."""
    (folder / f"ended-{rank}").touch()
    until = time.monotonic() + PATIENCE
    while len(list(folder.glob("ended-*"))) < num_ranks and time.monotonic() < until:
        time.sleep(0.05)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", required=True)
    parser.add_argument("--workload", choices=list(WORKLOADS), required=True)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--target", type=float, help="train to this test accuracy, in at most so many steps")
    parser.add_argument("--evaluate-every", type=int, default=50)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--test-samples", type=int, default=2000)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    workload = WORKLOADS[options.workload]
    splits = workload.load(options.samples)
    model = workload.build(splits.task)
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.lr, momentum=0.9)
    samples = workload.samples(splits.train, options.samples)
    is_peer = options.case == "free" or parse_hook(options.case) is not None
    num_ranks = int(os.environ["WORLD_SIZE"])
    training = (
        join(model, optimizer, samples, parse_hook(options.case))
        if is_peer
        else weave(model, optimizer, samples, num_ranks)
    )
    training.agree(0.0)
    if options.target is None:
        result = time_steps(training, workload, options.warm_up, options.steps)
    else:
        test = workload.samples(splits.test, options.test_samples)
        result = train_to_target(training, workload, test, options)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    (options.out / f"rank-{training.rank}.json").write_text(json.dumps({**result, "parameters": num_parameters}))
    training.agree(0.0)
    if is_peer:
        leave(options.out, training.rank, num_ranks)


if __name__ == "__main__":
    main()
