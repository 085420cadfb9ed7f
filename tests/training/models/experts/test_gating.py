"""Gates against the equations of the paper, token by token; routing against a loop over tokens."""

import math

import pytest
import torch
from torch import Tensor

from weft.training.models.experts.gating import LEAST_NOISE, NoisyTopK, squared_variation
from weft.training.models.experts.routing import route


def make_gate(top_k: int = 2, *, noisy: bool = True) -> NoisyTopK:
    torch.manual_seed(0)
    gate = NoisyTopK(6, 5, top_k, noisy=noisy).double()
    if gate.noise is not None:
        torch.nn.init.normal_(gate.noise)
    return gate


def noise_of(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(3, 4, 5, dtype=torch.float64)


def test_noise_in_training_alone() -> None:
    gate, x = make_gate(), torch.randn(3, 4, 6, dtype=torch.float64)
    clean = x @ gate.weight.t()
    assert gate.noise is not None
    noisy = clean + noise_of(7) * (torch.nn.functional.softplus(x @ gate.noise.t()) + LEAST_NOISE)
    torch.manual_seed(7)
    for found, logits in ((gate(x), noisy), (gate.eval()(x), clean)):
        best, experts = logits.topk(2)
        assert torch.equal(found.experts_gtk, experts)
        torch.testing.assert_close(found.weights_gtk, best.softmax(-1))
    assert gate(x).importance is None and gate(x).load is None


def test_load_is_the_chance_of_each_expert_with_its_noise_drawn_anew() -> None:
    gate, x = make_gate(), torch.randn(1, 4, 6, dtype=torch.float64)
    torch.manual_seed(3)
    found = gate(x)
    torch.manual_seed(3)
    clean = (x @ gate.weight.t())[0]
    assert gate.noise is not None
    spread = torch.nn.functional.softplus(x @ gate.noise.t())[0] + LEAST_NOISE
    noisy = clean + torch.randn(1, 4, 5, dtype=torch.float64)[0] * spread
    load = torch.zeros(5, dtype=torch.float64)
    for t in range(4):
        for i in range(5):
            others = sorted((noisy[t, j].item() for j in range(5) if j != i), reverse=True)
            z = (clean[t, i].item() - others[1]) / spread[t, i].item()
            load[i] += 0.5 * (1 + math.erf(z / math.sqrt(2)))
    assert found.load is not None
    torch.testing.assert_close(found.load, squared_variation(load[None]))


def test_importance_is_the_variation_of_summed_weights() -> None:
    gate, x = make_gate(noisy=False), torch.randn(2, 4, 6, dtype=torch.float64)
    found, sums = gate(x), torch.zeros(2, 5, dtype=torch.float64)
    for g in range(2):
        for t in range(4):
            for k in range(2):
                sums[g, found.experts_gtk[g, t, k]] += found.weights_gtk[g, t, k].detach()
    expected = (sums.var(1, correction=0) / sums.mean(1).square()).mean()
    assert found.importance is not None and found.load is None
    torch.testing.assert_close(found.importance, expected, rtol=1e-6, atol=0.0)


def test_a_balanced_use_costs_nothing_and_a_lopsided_one_the_most() -> None:
    assert squared_variation(torch.ones(3, 4)).item() == 0.0
    assert squared_variation(torch.tensor([[4.0, 0.0, 0.0, 0.0]])).item() == pytest.approx(3.0)


@pytest.mark.parametrize("capacity", [None, 1, 2, 5])
@pytest.mark.parametrize(("num_groups", "num_tokens"), [(1, 12), (3, 12), (4, 0), (0, 0)])
def test_routes_are_those_of_a_loop_over_tokens(capacity: int | None, num_groups: int, num_tokens: int) -> None:
    experts = torch.randint(0, 4, (2, num_tokens), generator=torch.Generator().manual_seed(1))
    taken: dict[int, list[tuple[int, int]]] = {expert: [] for expert in range(4)}
    used: dict[tuple[int, int], int] = {}
    for choice in range(2):
        for token in range(num_tokens):
            line = int(experts[choice, token]), token // (num_tokens // num_groups)
            used[line] = used.get(line, 0) + 1
            if capacity is None or used[line] <= capacity:
                taken[line[0]].append((line[1], choice * num_tokens + token))
    found = route(experts, num_groups, 4, capacity)
    in_order = [place for expert in range(4) for _, place in sorted(taken[expert], key=lambda pair: pair[0])]
    assert found.places.tolist() == in_order
    assert found.tokens.tolist() == [place % max(1, num_tokens) for place in in_order]
    assert found.counts.tolist() == [len(taken[expert]) for expert in range(4)]
