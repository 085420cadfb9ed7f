"""Plain PyTorch scripts with `weave` in them: what a user would run in one process and in several."""

import dataclasses

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from weft.distributed.script.weaving.weave import weave
from weft.distributed.script.world.world import find_world

__all__ = ["Script", "fail_beside_servers", "run_in_turn"]


class Forked(nn.Module):
    """Two layers in a row, one that nothing uses, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(8, 8)
        self.last = nn.Linear(8, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.frozen(self.first(x))))
        return out


@dataclasses.dataclass(frozen=True)
class Script:
    """A training loop of a user. Every value is JSON, so that a process can be told of it."""

    num_samples: int = 22  # batches of 8: the last has 6
    batch_size: int = 8
    epochs: int = 2
    accumulate: int = 1
    clip_norm: float | None = None
    num_workers: int = 0
    is_exact: bool = False  # whole numbers in float64, so that no sum is ever rounded
    has_generator: bool = False
    plan: str = "data"
    optimizer: str = "SGD"
    device: str = "cpu"

    def run(self) -> dict[str, list[float]]:
        """The parameters in the end, flat, and the loss of every step."""
        torch.manual_seed(4)
        model = self._model().to(self.device)
        options = {"momentum": 0.5} if self.optimizer == "SGD" else {}
        optimizer = getattr(torch.optim, self.optimizer)(model.parameters(), lr=2**-4, **options)
        model, optimizer, loader = weave(model, optimizer, self._loader(), plan=self.plan)
        num_batches = 0
        for _ in range(self.epochs):
            for step, (x, y) in enumerate(loader):
                loss = nn.functional.mse_loss(model(x.to(self.device)), y.to(self.device))
                (loss / self.accumulate).backward()
                if (step + 1) % self.accumulate == 0 or step + 1 == len(loader):
                    if self.clip_norm is not None:
                        nn.utils.clip_grad_norm_(model.parameters(), self.clip_norm)
                    optimizer.step()
                    optimizer.zero_grad()
                num_batches += 1
        assert num_batches == self.epochs * len(loader)
        return {name: parameter.flatten().tolist() for name, parameter in model.named_parameters()}

    def _model(self) -> nn.Module:
        if not self.is_exact:
            return Forked()
        model = nn.Linear(3, 1).double()
        for parameter in model.parameters():
            nn.init.constant_(parameter, 1.0)
        return model

    def _loader(self) -> DataLoader[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(7)
        dtype = torch.float64 if self.is_exact else torch.float32
        x = torch.randint(-1, 2, (self.num_samples, 3), generator=generator).to(dtype)
        y = torch.randint(-2, 3, (self.num_samples, 1), generator=generator).to(dtype)
        own = torch.Generator().manual_seed(9) if self.has_generator else None
        return DataLoader(
            TensorDataset(x, y),
            self.batch_size,
            shuffle=True,
            num_workers=self.num_workers,
            # The ranks of tests come from a fork server; workers that did too would import torch all over again.
            multiprocessing_context="fork" if self.num_workers else None,
            generator=own,
        )


def fail_beside_servers(rank: int, plan: str) -> None:
    """A script that fails on one rank, while the others would go on, and while each serves the other."""
    model = nn.Linear(3, 1)
    model, optimizer, loader = weave(model, torch.optim.SGD(model.parameters(), lr=0.1), Script()._loader(), plan)
    for number, (x, y) in enumerate(loader):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if number == 1 and find_world().rank == rank:
            raise ValueError("the script's own")


def run_in_turn(scripts: list[dict[str, object]]) -> list[dict[str, list[float]]]:
    """Several scripts in one process, each of which weaves: as often as a user with several models would."""
    return [Script(**settings).run() for settings in scripts]  # type: ignore[arg-type]
