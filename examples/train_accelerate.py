"""examples/train.py with Accelerate: accelerate launch --cpu --num_processes 2 examples/train_accelerate.py"""

import argparse
import gzip
import sys
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset

# Batches are split between ranks, and their order can be had again when an epoch is resumed.
accelerator = Accelerator(
    cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
)
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
        totals[0] += accelerator.gather_for_metrics(functional.cross_entropy(logits, y, reduction="none")).sum()
        totals[1] += accelerator.gather_for_metrics(logits.argmax(1) == y).sum()
    model.train()
    return totals


def save(path: Path, parts: dict[str, Any], **progress: int) -> None:
    accelerator.save({name: part.state_dict() for name, part in parts.items()} | progress, path)


def load(path: Path, parts: dict[str, Any]) -> dict[str, int]:
    saved: dict[str, Any] = torch.load(path)
    for name, part in parts.items():
        part.load_state_dict(saved.pop(name))
    return saved


def log(file: TextIO, *row: object) -> None:
    for out in (sys.stdout, file):
        accelerator.print(*row, sep=",", file=out, flush=True)


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
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint = args.out / "checkpoint"

    torch.manual_seed(args.seed)
    train_data = Clothes(args.data, "train", args.limit)
    test_data = Clothes(args.data, "t10k", args.limit and args.limit // 6)
    train_loader = DataLoader(train_data, args.batch_size, shuffle=True)
    test_loader = DataLoader(test_data, batch_size=256)

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    last_step = args.epochs * len(train_loader)
    scheduler = CosineAnnealingLR(optimizer, T_max=last_step)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    train_loader, test_loader = accelerator.prepare(train_loader, test_loader)

    parts = {"model": accelerator.unwrap_model(model), "optimizer": optimizer, "scheduler": scheduler}
    saved = {"epoch": 0, "batch": 0}  # where training stands: batches of this epoch are done
    if args.resume:
        saved = load(checkpoint, parts)

    step = saved["epoch"] * len(train_loader) + saved["batch"]
    with open(args.out / "log.csv", "a", encoding="utf-8") as file:
        for epoch in range(saved["epoch"], args.epochs):
            train_loader.set_epoch(epoch)  # an epoch that is resumed has the order that it began with
            for batch, (x, y) in enumerate(train_loader):
                if epoch == saved["epoch"] and batch < saved["batch"]:
                    continue
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
                optimizer.step()
                scheduler.step()
                step += 1
                if step % args.save_every == 0 or step in (args.stop_after, last_step):
                    save(checkpoint, parts, epoch=epoch, batch=batch + 1)
                if step == args.stop_after:
                    return
            loss_sum, num_right = evaluate(model, test_loader).tolist()
            log(file, epoch + 1, loss_sum / len(test_data), num_right / len(test_data))


if __name__ == "__main__":
    main()
    accelerator.end_training()
