"""Scripts whose plan splits linear layers, or pictures by rows: their loops give what one process gives."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import weft
from tests.distributed.script.virtual_script import run_script
from weft.errors import PlanError


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    pictures = torch.randn(13, 1, 8, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(pictures, torch.randint(5, (13,), generator=generator))


def make_model() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(64, 12), nn.GELU(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 5)),
    ).double()


def train(plan: str, rules: dict[str, str] | None = None, *, accumulate: int = 1, loss: Any = "mean") -> list[float]:
    """Norms of gradients as the script clips them, and a loss that ranks evaluate each at its own pace. The last batch
    has 3 samples."""
    torch.manual_seed(1)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(make_data(), 5, shuffle=True)
    model, optimizer, loader = weft.weave(model, optimizer, loader, plan, rules=rules, loss=loss)
    norms = []
    for _ in range(2):
        for step, (x, y) in enumerate(loader):
            functional.cross_entropy(model(x), y, reduction=loss).backward()
            if (step + 1) % accumulate == 0:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for x, y in weft.evaluation(DataLoader(make_data(), 2)):
        with torch.no_grad():
            total += functional.cross_entropy(model(x), y, reduction="sum")
    return [*norms, float(weft.sum(total))]


def check_same(plan: str, size: int, rules: dict[str, str] | None = None, **options: Any) -> None:
    expected = train("data", **options)
    for found in run_script(lambda: train(plan, rules, **options), size):
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("plan", "size"), [("linear=2", 2), ("linear=3", 3), ("data=2 linear=2", 4)])
@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"loss": "sum"}], ids=str)
def test_split_linear_layers(plan: str, size: int, options: dict[str, Any]) -> None:
    check_same(plan, size, **options)


@pytest.mark.parametrize("options", [{}, {"accumulate": 3}], ids=str)
def test_pictures_in_rows(options: dict[str, Any]) -> None:
    """What is in gradients before a backward is not added up once more over ranks that have rows."""
    check_same("data=2 tensor=2", 4, {"*": "space"}, **options)


def test_rules_say_which_layers_are_split() -> None:
    def count(rules: dict[str, str]) -> int:
        model = make_model()
        weft.weave(model, torch.optim.SGD(model.parameters(), lr=0.1), plan="linear=2", rules=rules)
        return sum(parameter.numel() for parameter in model.parameters())

    def counts() -> tuple[int, int]:
        return count({"4": "split", "*": "data"}), count({"*": "split"})

    (one, all_), _ = run_script(counts, 2)
    assert all_ < one < sum(parameter.numel() for parameter in make_model().parameters())


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(PlanError, match=r"unknown word of a rule \(fc: colum"):
        run_script(lambda: train("linear=2", {"fc": "colum"}), 2)
