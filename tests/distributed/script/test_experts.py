"""A script whose model has experts: under a plan that splits them, its loop gives what one process gives."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from tests.distributed.script.virtual_script import run_script
from weft.errors import PlanError

NUM_EXPERTS = 4


class Mixed(nn.Module):
    """Six tokens of a sample, and one number of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.experts = weft.MixtureOfExperts(8, 5, NUM_EXPERTS, noisy=False, balance=(0.5, 0.0))
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = self.last(x + self.experts(x)).mean(1)
        return out


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    options: Any = {"generator": generator, "dtype": torch.float64}
    return TensorDataset(torch.randn(13, 6, 3, **options), torch.randn(13, 1, **options))


def train(plan: str, *, accumulate: int = 1, decays: bool = False, batch_size: int = 5) -> dict[str, Any]:
    """Parameters in the end, and a loss that ranks evaluate each at its own pace. The last batch has 3 samples."""
    torch.manual_seed(1)
    model = Mixed().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    model, optimizer, loader = weft.weave(model, optimizer, DataLoader(make_data(), batch_size, shuffle=True), plan)
    for _ in range(2):
        for step, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(model(x), y)
            if decays:
                loss = loss + 0.1 * sum(parameter.square().sum() for parameter in model.parameters())
            loss.backward()
            if (step + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for x, y in weft.evaluation(DataLoader(make_data(), 2)):
        with torch.no_grad():
            total += nn.functional.mse_loss(model(x), y, reduction="sum")
    parts = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {"loss": weft.sum(total), **parts}


def check_same(plan: str, size: int, **options: Any) -> None:
    alone, ranks = train("data", **options), run_script(lambda: train(plan, **options), size)
    for name, expected in alone.items():
        found = [rank[name] for rank in ranks]
        is_split = name.startswith("experts.experts.")
        whole = torch.cat(found[: NUM_EXPERTS // len(found[0])]) if is_split else found[0]
        torch.testing.assert_close(whole, expected, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize(("plan", "size"), [("expert=2", 2), ("expert=4", 4), ("data=2 expert=2", 4)])
def test_the_loop_gives_what_one_process_gives(plan: str, size: int) -> None:
    check_same(plan, size)


def test_gradients_that_two_backwards_add_up() -> None:
    check_same("data=2 expert=2", 4, accumulate=3)


def test_terms_of_the_loss_that_are_computed_from_parameters() -> None:
    check_same("expert=2", 2, decays=True)


def test_a_rank_without_a_sample_of_the_last_batch() -> None:
    check_same("expert=2", 2, batch_size=4)


def test_several_models_are_refused() -> None:
    def script() -> None:
        models = [Mixed(), Mixed()]
        optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
        weft.weave(models, optimizer, None, "expert=2")

    with pytest.raises(PlanError, match="splits one model"):
        run_script(script, 2)
