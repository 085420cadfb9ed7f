"""Noisy top-k gating (Shazeer et al., 2017, section 2.1 and appendix A).

    H(x)_i     = (x W_gate)_i + noise * softplus((x W_noise)_i)         noise: standard normal, in training alone
    G(x)       = softmax(the k largest of H(x)), 0 for the others
    P(x, i)    = Phi(((x W_gate)_i - the k-th largest of the other H(x)) / softplus((x W_noise)_i))
                 the chance that expert i is among the k once its noise is drawn anew

    importance = sum over x of G(x)       Load = sum over x of P(x, .)
    losses     = CV(importance)^2, CV(load)^2       of each group of tokens; the mean over groups

Shape suffixes: g groups, t tokens of a group, w width, e experts, k choices.
"""

import math
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Gates", "NoisyTopK", "squared_variation"]

LEAST_NOISE = 1e-2
"""Added to the spread of the noise, as in the authors' own code: no token's chance divides by nothing."""


@dataclass(frozen=True)
class Gates:
    """The experts of each token, best first, and the weights of what they give.

    Args:
        importance: CV squared of the sums of weights; None where nothing is trained.
        load: CV squared of the numbers of tokens that are to be expected; None also where there is no noise.
    """

    experts_gtk: Tensor
    weights_gtk: Tensor
    importance: Tensor | None = None
    load: Tensor | None = None


@final
class NoisyTopK(nn.Module):
    """From tokens to their experts.

    Args:
        top_k: experts of each token.
        noisy: whether training draws noise, which lets tokens try other experts than their best.
    """

    def __init__(self, width: int, num_experts: int, top_k: int, *, noisy: bool = True) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.empty(num_experts, width))
        self.noise = nn.Parameter(torch.zeros(num_experts, width)) if noisy else None
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, x_gtw: Tensor) -> Gates:
        clean_gte = F.linear(x_gtw, self.weight)
        spread_gte = None
        noisy_gte = clean_gte
        if self.training and self.noise is not None:
            spread_gte = F.softplus(F.linear(x_gtw, self.noise)) + LEAST_NOISE
            noisy_gte = clean_gte + torch.randn_like(clean_gte) * spread_gte
        best_gtk, experts_gtk = noisy_gte.topk(self.top_k, dim=-1)
        weights_gtk = best_gtk.softmax(-1)
        if not (self.training and torch.is_grad_enabled()):
            return Gates(experts_gtk, weights_gtk)
        importance_ge = torch.zeros_like(clean_gte).scatter(-1, experts_gtk, weights_gtk).sum(-2)
        load = None
        if spread_gte is not None and self.top_k < clean_gte.shape[-1]:
            load = squared_variation(_chances(clean_gte, noisy_gte, spread_gte, self.top_k).sum(-2))
        return Gates(experts_gtk, weights_gtk, squared_variation(importance_ge), load)


def _chances(clean_gte: Tensor, noisy_gte: Tensor, spread_gte: Tensor, top_k: int) -> Tensor:
    """That each expert is among the best, the others' noise being as it was drawn."""
    best = noisy_gte.topk(top_k + 1, dim=-1).values
    last_in, first_out = best[..., top_k - 1, None], best[..., top_k, None]
    limit_gte = torch.where(noisy_gte > first_out, first_out, last_in)
    chances: Tensor = torch.special.ndtr((clean_gte - limit_gte) / spread_gte)
    return chances


def squared_variation(amounts_ge: Tensor) -> Tensor:
    """The squared coefficient of variation over experts, the mean over groups; 0 of no groups.

    >>> squared_variation(torch.tensor([[1.0, 3.0], [2.0, 2.0]])).item()  # (1 / 2)^2 and 0
    0.125
    """
    mean_g = amounts_ge.mean(-1)
    variance_g = (amounts_ge - mean_g[:, None]).square().mean(-1)
    return (variance_g / (mean_g.square() + 1e-10)).sum() / max(1, len(mean_g))
