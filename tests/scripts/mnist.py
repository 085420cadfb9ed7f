"""A classifier as pytorch/examples/mnist: a shuffled loader, a mean loss, Adadelta, a test after every epoch."""

import sys

import torch
from torch import nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import weft

torch.manual_seed(1)
x = torch.randn(330, 1, 8, 8)
y = x.mean(1).view(-1, 2, 4, 8).sum((2, 3)).argmax(1)  # is the upper half the brighter one?
train_loader = DataLoader(TensorDataset(x[:230], y[:230]), batch_size=16, shuffle=True)
test_loader = DataLoader(TensorDataset(x[230:], y[230:]), batch_size=30)  # 100 samples: the last batch is short

model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10), nn.LogSoftmax(dim=1))
optimizer = optim.Adadelta(model.parameters(), lr=1.0)
scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
model, optimizer, train_loader = weft.weave(model, optimizer, train_loader)
test_loader = weft.evaluation(test_loader)

for epoch in range(1, 4):
    model.train()
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = functional.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
    model.eval()
    test_loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            test_loss += functional.nll_loss(output, target, reduction="sum").item()
            correct += int((output.argmax(1) == target).sum())
    totals = weft.sum({"loss": test_loss, "correct": correct})
    weft.print(f"epoch {epoch} loss {totals['loss'] / 100:.4f} accuracy {totals['correct']}/100")
    scheduler.step()

if weft.is_first:
    torch.save(model.state_dict(), sys.argv[1])
