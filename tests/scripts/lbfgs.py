"""LBFGS as in pytorch/examples/time_sequence_prediction: a closure that is called many times a step, whose loss steers
a line search."""

import sys

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft

torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
x = torch.randn(61, 3)  # two ranks get 31 and 30
y = torch.sin(x.sum(1, keepdim=True))
loader = DataLoader(TensorDataset(x, y), batch_size=61)

model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=5, line_search_fn="strong_wolfe")
model, optimizer, loader = weft.weave(model, optimizer, loader)

for step in range(1, 5):
    for inputs, targets in loader:

        def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        weft.print(f"step {step} loss {loss.item():.6f}")

if weft.is_first:
    torch.save(model.state_dict(), sys.argv[1])
