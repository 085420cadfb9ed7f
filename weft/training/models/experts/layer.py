"""A sparsely gated mixture-of-experts layer (Shazeer et al., 2017), in the place of a feed-forward part.

    x -> gate -> the experts of each token -> sum of what they give, each times its weight
                 tokens beyond an expert's capacity: 0 from it, so that the residual around the layer passes them on

Its auxiliary losses, which keep experts evenly used, are no part of the loss that is shown. In backward the layer adds
their gradients by itself, as if the script or recipe had added them to a loss that is a mean over samples:

    loss.backward()     output <- gradient of the loss
                        gate   <- gradient of the loss through the output, and 1 * that of the auxiliary losses

They are means over samples too (each sample's tokens are a group), so that any plan that averages gradients over ranks
gives them the right weight; where gradients are weighted before backward, `weighting` says by how much.

A script that scales its loss (accumulation, gradient scalers) has the layer leave it to the script (`adds_auxiliary =
False`), and adds `auxiliary_loss(model)` to the loss before it is scaled.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.autograd import Function

from weft.errors import UsageError
from weft.training.models.experts.feed_forward import Experts
from weft.training.models.experts.gating import Gates, NoisyTopK
from weft.training.models.experts.routing import capacity_of, route
from weft.training.weighting import Weighting, weight_of_loss

__all__ = ["MixtureOfExperts", "auxiliary_loss", "mixtures_of"]


@final
class MixtureOfExperts(nn.Module):
    """Tokens [..., tokens, width] -> [..., tokens, width]; the last two dimensions of one sample are its tokens.

    Args:
        hidden: the width inside of each expert.
        top_k: experts of each token.
        capacity_factor: an expert takes so many times its even share of a group's tokens at most; None for all.
        balance: in the loss, the weights of the squared coefficients of variation of the experts' importance and of
            their load; of the load there is one only with noise.
        noisy: whether training draws noise for the gate.
        groups: what capacity and balance count over: the tokens of each sample, the same under every plan; or all that
            are given at once, which are those of a rank's share, or micro-batch.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        num_experts: int,
        *,
        top_k: int = 2,
        capacity_factor: float | None = 1.25,
        balance: tuple[float, float] = (0.01, 0.01),
        noisy: bool = True,
        groups: Literal["sample", "batch"] = "sample",
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise UsageError(f"no such number of experts for a token (top_k: {top_k}, experts: {num_experts})")
        if capacity_factor is not None and not capacity_factor > 0:
            raise UsageError(f"experts would take no token (capacity_factor: {capacity_factor}); give None for all")
        if groups not in ("sample", "batch"):
            raise UsageError(f"unknown groups ({groups!r}); give 'sample' or 'batch'")
        self.num_experts, self.top_k, self.capacity_factor = num_experts, top_k, capacity_factor
        self.balance, self.groups = balance, groups
        self.gate = NoisyTopK(width, num_experts, top_k, noisy=noisy)
        self.experts = Experts(width, hidden, num_experts)
        self.adds_auxiliary = True
        """Whether backward adds the gradient of the auxiliary losses by itself."""
        self.weighting = Weighting()
        """Of the auxiliary losses, where gradients are weighted before backward."""
        self.auxiliary: Tensor | None = None
        """The auxiliary loss of the last forward in training."""
        self.statistics: Mapping[str, Tensor] = {}
        """Of the last forward: `dropped`, the share of choices that were beyond capacity, and tokens by expert."""

    def forward(self, x: Tensor) -> Tensor:
        x_gtw = x.flatten(0, -3) if self.groups == "sample" and x.dim() > 2 else x.flatten(0, -2)[None]
        gates = self.gate(x_gtw)
        out = self._mix(x_gtw, gates).view(x.shape)
        self.auxiliary = auxiliary = self._auxiliary(gates)
        if auxiliary is None or not self.adds_auxiliary:
            return out
        self.auxiliary = auxiliary.detach()
        weight = self.weighting.value * weight_of_loss()
        added: Tensor = _AddGradient.apply(out, auxiliary, weight)  # type: ignore[no-untyped-call]
        return added

    def _mix(self, x_gtw: Tensor, gates: Gates) -> Tensor:
        num_groups, length, _ = x_gtw.shape
        capacity = capacity_of(self.capacity_factor, self.top_k, length, self.num_experts)
        experts_kt = gates.experts_gtk.flatten(0, 1).t()
        routing = route(experts_kt, num_groups, self.num_experts, capacity)
        self.statistics = {
            "dropped": 1 - routing.counts.sum() / max(1, experts_kt.numel()),
            "tokens": routing.counts,
        }
        x_tw = x_gtw.flatten(0, 1)
        found_nw = self.experts(x_tw.index_select(0, routing.tokens), routing.counts)
        weights_n = gates.weights_gtk.flatten(0, 1).t().flatten().index_select(0, routing.places)
        mixed_nw = found_nw * weights_n[:, None].to(found_nw.dtype)
        out_tw: Tensor = mixed_nw.new_zeros(x_tw.shape).index_add(0, routing.tokens, mixed_nw)
        return out_tw

    def _auxiliary(self, gates: Gates) -> Tensor | None:
        if gates.importance is None:
            return None
        importance, load = self.balance
        auxiliary = importance * gates.importance
        return auxiliary if gates.load is None else auxiliary + load * gates.load


@final
class _AddGradient(Function):
    """The identity, that gives `auxiliary` the gradient that it would have as a part of the loss, times a weight."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, auxiliary: Tensor, weight: float) -> Tensor:
        ctx.weight, ctx.dtype = weight, auxiliary.dtype
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        return gradient, torch.full((), ctx.weight, dtype=ctx.dtype, device=gradient.device), None


def mixtures_of(model: nn.Module) -> Iterator[tuple[str, MixtureOfExperts]]:
    """The layers of a model, by name."""
    for name, module in model.named_modules():
        if isinstance(module, MixtureOfExperts):
            yield name, module


def auxiliary_loss(model: nn.Module) -> Tensor:
    """The auxiliary losses of the last forward of a model, for a script whose layers do not add their gradients.

    >>> layer = MixtureOfExperts(4, 8, 2, top_k=1)
    >>> layer.adds_auxiliary = False
    >>> loss = layer(torch.randn(3, 5, 4)).square().mean() + auxiliary_loss(layer)
    """
    found = [layer.auxiliary for _, layer in mixtures_of(model) if layer.auxiliary is not None]
    return torch.stack(found).sum() if found else torch.zeros(())
