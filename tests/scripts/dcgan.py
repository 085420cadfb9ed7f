"""Two networks against each other as pytorch/examples/dcgan: two models, two optimizers, batch norm, drawn noise."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft

torch.manual_seed(1)
loader = DataLoader(TensorDataset(torch.rand(84, 1, 8, 8)), batch_size=16, shuffle=True, drop_last=True)

generator = nn.Sequential(
    *(nn.ConvTranspose2d(6, 8, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Tanh())
)
critic = nn.Sequential(
    *(nn.Conv2d(1, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 4), nn.Sigmoid(), nn.Flatten(0))
)
criterion = nn.BCELoss()
optimizers = [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5) for net in (critic, generator)]
(critic, generator), (critic_optimizer, generator_optimizer), loader = weft.weave(
    [critic, generator], optimizers, loader, batch_norm="global"
)

for epoch in range(1, 3):
    for (real,) in loader:
        critic.zero_grad()
        loss_real = criterion(critic(real), torch.ones(len(real)))
        loss_real.backward()
        noise = weft.share(torch.randn(16, 6, 1, 1))
        fake = generator(noise)
        loss_fake = criterion(critic(fake.detach()), torch.zeros(len(fake)))
        loss_fake.backward()
        critic_optimizer.step()

        generator.zero_grad()
        loss = criterion(critic(fake), torch.ones(len(fake)))
        loss.backward()
        generator_optimizer.step()
    both = weft.mean({"critic": (loss_real + loss_fake).item(), "generator": loss.item()})
    weft.print(f"epoch {epoch} critic {both['critic']:.4f} generator {both['generator']:.4f}")

if weft.is_first:
    torch.save({"critic": critic.state_dict(), "generator": generator.state_dict()}, sys.argv[1])
