"""Shares by measured speed under `weave`: loaders and `weft.share` deal them, and the result is that of one process."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.script.virtual_script import run_script
from weft.distributed.script.data.sharing import share
from weft.distributed.script.weaving.weave import weave
from weft.distributed.script.world.world import find_world
from weft.errors import PlanError

SAMPLES, BATCH = 66, 12  # the last batch has 6


def train(num_workers: int = 0, *, by_hand: bool = False) -> tuple[Tensor, list[int]]:
    """The weights in the end, and the samples that this rank had of every batch; rank 1 is slow."""
    torch.manual_seed(3)
    model = nn.Linear(4, 1)
    x, y = torch.randn(SAMPLES, 4), torch.randn(SAMPLES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(TensorDataset(x, y), BATCH, shuffle=True, num_workers=num_workers)
    model, optimizer, woven = weave(model, optimizer, None if by_hand else loader)
    world, sizes = find_world(), []
    for _ in range(3):
        for own, target in woven if woven is not None else loader:
            own, target = share(own, target) if by_hand else (own, target)
            sizes.append(len(own))
            world.group.clock.charge(len(own) * (0.003 if world.rank == 1 else 0.001))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(own), target).backward()
            optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), sizes


@pytest.mark.parametrize("topology", ["native", "server(1)"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_slow_rank_of_a_script_is_given_less(topology: str, by_hand: bool) -> None:
    script = partial(train, by_hand=by_hand)
    alone, _ = run_script(script, 1)[0]
    found = run_script(script, 3, f"data=3 share=measured(2) topology={topology}")
    for weights, _ in found:
        torch.testing.assert_close(weights, alone, rtol=1e-5, atol=1e-6)
    (_, first), (_, slow), (_, last) = found
    assert [sum(own) for own in zip(first, slow, last, strict=True)] == [12, 12, 12, 12, 12, 6] * 3
    assert (first[0], slow[0], last[0]) == (4, 4, 4) and (first[-2], slow[-2], last[-2]) == (5, 2, 5)


@pytest.mark.parametrize("text", ["consistency=local(2)", "consistency=async topology=server(1)", "topology=server(1)"])
def test_parts_of_a_model_in_a_script_are_not_relaxed(text: str) -> None:
    with pytest.raises(PlanError, match=r"update together in every step.*use consistency=sync"):
        run_script(train, 4, f"data=2 tensor=2 {text}")
