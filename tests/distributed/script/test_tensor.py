"""Scripts under tensor plans, their loops as they are: samples by replica, clipping by the whole norm, parts saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from tests.distributed.script.virtual_script import run_script
from weft.distributed.script.weaving import clipping
from weft.errors import UsageError


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(30, 6, generator=generator), torch.randint(4, (30,), generator=generator))


def make(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Dropout(dropout), nn.Linear(10, 4))


def train(
    dropout: float = 0.0, save: Path | None = None, load: Path | None = None, **options: Any
) -> tuple[dict[str, Tensor], list[float], float]:
    """The state, the norms of gradients, and how many are right in the end."""
    model, order = make(dropout), torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loader: Any = DataLoader(data(), batch_size=8, shuffle=True, generator=order)
    model, optimizer, loader = weft.weave(model, optimizer, loader, **options)
    if load is not None:
        weft.load(load, model=model, optimizer=optimizer)
    norms = []
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
    if save is not None:
        weft.save(save, model=model, optimizer=optimizer)
    model.eval()
    num_right = torch.zeros(())
    for x, y in weft.evaluation(DataLoader(data(), batch_size=8)):
        num_right += (model(x).argmax(1) == y).sum()
    return weft.state_dict(model), norms, weft.sum(num_right).item()


def check(found: list[Any], expected: Any) -> None:
    for state, norms, num_right in found:
        assert norms == pytest.approx(expected[1], rel=1e-5)
        assert num_right == expected[2]
        for name, tensor in expected[0].items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("size", "plan"), [(2, "tensor=2"), (4, "data=2 tensor=2")])
def test_a_script_gives_what_one_process_gives(size: int, plan: str) -> None:
    check(run_script(train, size, plan), run_script(train, 1)[0])


def test_dropout_has_the_masks_of_one_process() -> None:
    check(run_script(lambda: train(0.4), 2, "tensor=2"), run_script(lambda: train(0.4), 1)[0])


def test_rules_by_hand_and_a_plan_of_the_script() -> None:
    rules = {"3": "column", "0": "whole"}
    check(run_script(lambda: train(plan="tensor=2", rules=rules), 2), run_script(train, 1)[0])


def test_parts_are_saved_and_loaded_under_any_plan(tmp_path: Path) -> None:
    expected = run_script(lambda: train(save=tmp_path / "one"), 1)[0]
    after = run_script(lambda: train(load=tmp_path / "one"), 1)[0]
    check(run_script(lambda: train(save=tmp_path / "two"), 2, "tensor=2"), expected)
    check(run_script(lambda: train(load=tmp_path / "two"), 1), after)
    check(run_script(lambda: train(load=tmp_path / "one"), 4, "data=2 tensor=2"), after)


def test_clipping_by_the_norm_of_a_part_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipping, "_find", lambda given: None)
    with pytest.raises(AssertionError):
        check(run_script(train, 2, "tensor=2"), run_script(train, 1)[0])


def test_norms_of_other_orders() -> None:
    def script() -> float:
        model = make()
        weft.weave(model, None, plan="tensor=2" if size == 2 else "data")
        F.cross_entropy(model(data().tensors[0]), data().tensors[1]).backward()
        norm: float = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], 3.0).item()
        if size == 2:
            with pytest.raises(UsageError, match="use norm_type=2"):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf"))
        return norm

    size = 1
    (expected,) = run_script(script, 1)
    size = 2
    assert run_script(script, 2) == pytest.approx([expected] * 2)
