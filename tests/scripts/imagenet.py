"""Images as pytorch/examples/imagenet: workers of a loader, batch norm, a schedule, the best model kept and resumed."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import weft

torch.manual_seed(1)
folder = Path(sys.argv[1]).with_suffix("")
x = torch.randn(200, 3, 8, 8)
y = x.flatten(1)[:, :5].argmax(1)
train_loader = DataLoader(TensorDataset(x[:150], y[:150]), batch_size=32, shuffle=True, num_workers=1)
val_loader = DataLoader(TensorDataset(x[150:], y[150:]), batch_size=16)

model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
scheduler = StepLR(optimizer, step_size=2, gamma=0.1)
model, optimizer, train_loader = weft.weave(model, optimizer, train_loader, batch_norm="global")


def train() -> float:
    model.train()
    total = 0.0
    for images, target in train_loader:
        loss = nn.functional.cross_entropy(model(images), target)
        total += loss.item() * len(target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(weft.sum(total)) / 150


@torch.no_grad()
def validate() -> float:
    model.eval()
    right = sum(int((model(images).argmax(1) == target).sum()) for images, target in weft.evaluation(val_loader))
    return float(weft.sum(right)) / 50


best, best_epoch = 0.0, 0
for epoch in range(1, 5):
    loss = train()
    accuracy = validate()
    scheduler.step()
    weft.print(f"epoch {epoch} loss {loss:.4f} accuracy {accuracy:.2f} lr {scheduler.get_last_lr()[0]:.3f}")
    if accuracy > best:
        best, best_epoch = accuracy, epoch
        weft.save(folder / "best", model=model, optimizer=optimizer, scheduler=scheduler, epoch=epoch, best=best)

saved = weft.load(folder / "best", model=model, optimizer=optimizer, scheduler=scheduler)
weft.print(f"best {saved['best']:.2f} of epoch {saved['epoch']}, again {validate():.2f}")
assert (saved["best"], saved["epoch"]) == (best, best_epoch)
train()  # goes on from there

if weft.is_first:
    torch.save(model.state_dict(), sys.argv[1])
