"""An autoencoder as pytorch/examples/vae: a loss that is a sum over the batch.

The noise of a sample is part of the data set here: drawn in the model it would be another on every number of ranks.
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import weft

torch.manual_seed(1)
data = TensorDataset(torch.rand(90, 36), torch.randn(90, 4))
loader = DataLoader(data, batch_size=20, shuffle=True)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mean, self.spread = nn.Linear(36, 24), nn.Linear(24, 4), nn.Linear(24, 4)
        self.outer, self.picture = nn.Linear(4, 24), nn.Linear(24, 36)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = functional.relu(self.inner(x))
        mean, spread = self.mean(hidden), self.spread(hidden)
        code = mean + noise * torch.exp(spread / 2)
        return torch.sigmoid(self.picture(functional.relu(self.outer(code)))), mean, spread


def loss_of(picture: Tensor, x: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    divergence = -0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())
    return functional.binary_cross_entropy(picture, x, reduction="sum") + divergence


model = Autoencoder()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)  # Adam would hide a wrong factor
model, optimizer, loader = weft.weave(model, optimizer, loader, loss="sum")

for epoch in range(1, 4):
    train_loss = 0.0
    for x, noise in loader:
        optimizer.zero_grad()
        picture, mean, spread = model(x, noise)
        loss = loss_of(picture, x, mean, spread)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
    weft.print(f"epoch {epoch} loss {weft.sum(train_loss) / len(data):.4f}")

if weft.is_first:
    torch.save(model.state_dict(), sys.argv[1])
