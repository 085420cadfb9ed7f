"""examples/train.py with DistributedDataParallel: torchrun --nproc-per-node 2 examples/train_ddp.py --epochs 3"""

import argparse
import gzip
import sys
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

DATA = "/usr/share/datasets/fashion-mnist"  # Debian: apt install dataset-fashion-mnist


class Clothes(Dataset[tuple[Tensor, int]]):
    """Pictures of 1 x 28 x 28 and their classes; `split` is "train" or "t10k"."""

    def __init__(self, folder: Path, split: str, limit: int | None = None) -> None:
        with gzip.open(folder / f"{split}-images-idx3-ubyte.gz") as file:
            self.pixels = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)[:limit]
        with gzip.open(folder / f"{split}-labels-idx1-ubyte.gz") as file:
            self.classes = np.frombuffer(file.read(), np.uint8, offset=8)[:limit]

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor(self.pixels[index], dtype=torch.float32) / 255 - 0.286, int(self.classes[index])


def make_model() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, stride=2), nn.GELU(), nn.Conv2d(16, 32, 5, stride=2), nn.GELU()),
        *(nn.Flatten(), nn.Linear(512, 64), nn.GELU(), nn.Linear(64, 10)),
    )


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader[Any]) -> Tensor:
    """The sum of the losses, and how many classes are right."""
    totals = torch.zeros(2, dtype=torch.float64)
    model.eval()
    for x, y in loader:
        logits = model(x)
        totals[0] += functional.cross_entropy(logits, y, reduction="sum")
        totals[1] += (logits.argmax(1) == y).sum()
    model.train()
    return totals


def save(path: Path, parts: dict[str, Any], **progress: int) -> None:
    if dist.get_rank() == 0:
        torch.save({name: part.state_dict() for name, part in parts.items()} | progress, path)
    dist.barrier()  # nobody reads what is being written


def load(path: Path, parts: dict[str, Any]) -> dict[str, int]:
    saved: dict[str, Any] = torch.load(path)
    for name, part in parts.items():
        part.load_state_dict(saved.pop(name))
    return saved


def log(file: TextIO, *row: object) -> None:
    for out in (sys.stdout, file):
        print(*row, sep=",", file=out, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--limit", type=int, help="pictures to train with; a sixth of it to evaluate")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--stop-after", type=int, metavar="STEPS", help="leave early, to be resumed")
    parser.add_argument("--out", type=Path, default=Path("runs/fashion"))
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if args.batch_size % num_ranks:
        parser.error(f"the batch size must be a multiple of {num_ranks}")
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint = args.out / "checkpoint"

    torch.manual_seed(args.seed)
    train_data = Clothes(args.data, "train", args.limit)
    test_data = Clothes(args.data, "t10k", args.limit and args.limit // 6)
    sampler: DistributedSampler[Any] = DistributedSampler(train_data, shuffle=True, seed=args.seed)
    train_loader = DataLoader(train_data, args.batch_size // num_ranks, sampler=sampler)
    own: Dataset[Any] = Subset(
        test_data, range(rank, len(test_data), num_ranks)
    )  # a DistributedSampler would repeat some of them
    test_loader = DataLoader(own, batch_size=256)

    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    last_step = args.epochs * len(train_loader)
    scheduler = CosineAnnealingLR(optimizer, T_max=last_step)

    parts = {"model": model.module, "optimizer": optimizer, "scheduler": scheduler}
    saved = {"epoch": 0, "batch": 0}  # where training stands: batches of this epoch are done
    if args.resume:
        saved = load(checkpoint, parts)

    step = saved["epoch"] * len(train_loader) + saved["batch"]
    with open(args.out / "log.csv", "a", encoding="utf-8") as file:
        for epoch in range(saved["epoch"], args.epochs):
            sampler.set_epoch(epoch)  # an epoch that is resumed has the order that it began with
            for batch, (x, y) in enumerate(train_loader):
                if epoch == saved["epoch"] and batch < saved["batch"]:
                    continue
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(x), y)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
                optimizer.step()
                scheduler.step()
                step += 1
                if step % args.save_every == 0 or step in (args.stop_after, last_step):
                    save(checkpoint, parts, epoch=epoch, batch=batch + 1)
                if step == args.stop_after:
                    return
            totals = evaluate(model.module, test_loader)
            dist.all_reduce(totals)
            loss_sum, num_right = totals.tolist()
            if rank == 0:
                log(file, epoch + 1, loss_sum / len(test_data), num_right / len(test_data))


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
