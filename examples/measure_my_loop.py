"""A plain PyTorch loop that measures itself: python examples/measure_my_loop.py, then weft show runs/my_loop"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft

torch.manual_seed(0)
pixels, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
loader = DataLoader(data, batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for _epoch in range(3):
    for x, y in weft.measured(loader, "train"):
        optimizer.zero_grad()
        with weft.measure("forward"):
            loss = nn.functional.cross_entropy(model(x), y)
        with weft.measure("backward"):
            loss.backward()
        optimizer.step()

print(weft.measurements.table())
weft.measurements.save("runs/my_loop")
