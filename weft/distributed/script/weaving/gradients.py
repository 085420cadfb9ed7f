"""Gradients of synchronous ranks, averaged in buckets while the script's backward runs.

backward      [netG layer 2][netG layer 1] ... [netD layer 2] ...       one exchange for each model, so that a backward
netG          =====> ====>                                              that touches one of several exchanges that one
netD                                            =====>
when it ends  netD, then netG: waited for in the order of the models, on every rank
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, final

import torch
from torch import Tensor
from torch.autograd import Variable

from weft.distributed.placement.exchange import GradientExchange
from weft.distributed.placement.factors.layers import FactoredLayers
from weft.distributed.placement.shares import MeasuredShares
from weft.distributed.script.data.batch_share import BatchShare
from weft.distributed.script.weaving.discarded import DiscardedGradients
from weft.distributed.script.weaving.dtensors import as_dtensor, lay_out_gradient, local_of
from weft.distributed.script.weaving.incoming import IncomingGradients, Loss, factor_of_loss
from weft.distributed.script.weaving.scaling import FollowedScale
from weft.errors import UsageError
from weft.torch_private import shares_memory

__all__ = ["Backward", "GradientHooks", "ModelGradients"]


class ModelGradients(Protocol):
    """The gradients of one model in the backward calls of a weaving."""

    index: int  # of the model
    is_owed: bool  # what backward left inside of no_sync is in the parameters

    @property
    def has_gradients(self) -> bool: ...

    def end(self) -> None:
        """A backward in which it had a part is over."""


@final
class Backward:
    """The backward calls of all models of a weaving: how each counts, and what happens when one is over.

    Every rank leaves backward with the same gradients, so that one that was there before (accumulation) is the same on
    all ranks, and averaging it once more changes nothing.

    Args:
        parameters: that are trained, of all models.
        is_weighted: what comes to the parameters has the weight of this rank's share already, by `factor`.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        share: BatchShare,
        num_ranks: int,
        loss: Loss = "mean",
        *,
        is_weighted: bool = False,
    ) -> None:
        self._parameters = parameters
        self._share = share
        self._num_ranks = num_ranks
        self._loss: Loss = loss
        # Incoming gradients are multiplied by this rank's share, and all ranks count alike.
        self._is_scaled = is_weighted
        self.models: list[ModelGradients] = []
        self._running: list[ModelGradients] = []
        self.dealer: MeasuredShares | None = None
        """Of shares by measured speed, and beside it `gather`, of a tensor of every rank."""
        self.gather: Callable[[Tensor], Sequence[Tensor]] = lambda tensor: (tensor,)
        self.is_held = False  # inside of no_sync
        self.exchanged: set[str] = set()
        """Parameters whose gradients have been exchanged since the step that used them last."""
        self.discarded: DiscardedGradients | None = None
        """Where a codec keeps a part of gradients back, and beside it `scale`, of what is kept."""
        self.scale: FollowedScale | None = None
        self.prepare: Callable[[], None] = lambda: None  # before the first exchange of a backward
        if loss == "sum" and not is_weighted:
            IncomingGradients(parameters, self.factor)

    @property
    def weight(self) -> float | None:
        """With which this rank's gradients count in the exchange; None for as much as those of the others."""
        return None if self._is_scaled else self._share.weight

    def factor(self) -> float:
        """By which gradients are multiplied before they are exchanged."""
        factor = factor_of_loss(self._loss, self._share.weight)
        return factor * self._share.weight * self._num_ranks if self._is_scaled else factor

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients in the parameters as this rank has them; the next backward outside exchanges the sum."""
        if not self._is_scaled:  # once for all: what is added up here counts each with the share of its own batch
            self._is_scaled = True
            if self._loss == "mean":
                IncomingGradients(self._parameters, self.factor)
        before, self.is_held = self.is_held, True
        try:
            yield
        finally:
            self.is_held = before

    def check_exchanged(self) -> None:
        """Before an update."""
        if any(model.is_owed and model.has_gradients for model in self.models):
            raise UsageError(
                "gradients of no_sync were not exchanged before optimizer.step(), and ranks would drift apart; "
                "leave the last backward before a step outside of no_sync"
            )

    def not_exchanged(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients that no backward has exchanged since the last step: the script has put them there by itself."""
        if parameters.keys() <= self.exchanged:  # as in nearly every step
            return {}
        unseen = [name for name in parameters if name not in self.exchanged]
        found = {name: parameters[name].grad for name in unseen}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def look_for_discarded(self, parameters: Mapping[str, Tensor], arrived: str) -> None:
        """When an exchange of these begins, whose first gradient has arrived: it may be added to what was there."""
        if self.discarded is None or self.exchanged.isdisjoint(parameters):  # as in nearly every backward
            return
        found = {name: parameter.grad for name, parameter in parameters.items() if name in self.exchanged}
        found.pop(arrived, None)
        self.discarded.look(found)

    def begin(self, model: "ModelGradients") -> None:
        if not self._running:
            self.prepare()
            # autograd calls it when the whole of this backward is done, as DDP has it do.
            Variable._execution_engine.queue_callback(self._end)
        self._running.append(model)

    def _end(self) -> None:
        running, self._running = self._running, []
        if self.dealer is not None:
            self.dealer.stop()
        # In one order on all ranks, whichever model's gradients came first: they wait for each other.
        for model in sorted(running, key=lambda model: model.index):
            model.end()
        if self.dealer is not None:
            self.dealer.end_step(self.gather)


@final
class GradientHooks:
    """Averages the gradients of one model's parameters during its backward; kept alive by the hooks themselves.

    Args:
        parameters: that are trained, by the names of the exchange.
        index: of the model in its weaving.
        waiting: entered while this rank waits for the others.
        factors: the model's layers whose gradients of weights come as rows.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        exchange: GradientExchange,
        backward: Backward,
        index: int = 0,
        waiting: AbstractContextManager[None] | None = None,
        factors: FactoredLayers | None = None,
    ) -> None:
        self.index = index
        self._rows = factors.weights if factors is not None else {}
        self._waiting = waiting or nullcontext()
        self._parameters = parameters
        self._exchange = exchange
        self._backward = backward
        self._is_running = False
        self._is_empty = False  # this rank has no part in the batch
        self.is_owed = False  # what backward left inside of no_sync is in the parameters
        self._untouched: set[str] = set()  # by the backward that runs
        backward.models.append(self)
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            if not self._is_running:
                if self._backward.is_held:
                    self.is_owed = True
                    return
                self._backward.look_for_discarded(self._parameters, name)
                self._is_running, self._untouched = True, set(self._parameters)
                weight = self._backward.weight
                self._exchange.begin(weight)
                self._is_empty = weight == 0.0
                self._backward.begin(self)
            # Beside rows a weight may have a sum of earlier backward calls, which all ranks have.
            is_kept = name in self._rows and self._rows[name].is_grad_kept() and not self.is_owed
            lay_out_gradient(parameter)
            # Views on the way back give two parameters one piece of memory, which would be averaged twice in place.
            if parameter.grad is not None and shares_memory(local_of(parameter.grad)):
                parameter.grad = parameter.grad.clone()
            if self._is_empty and parameter.grad is not None and not is_kept:
                parameter.grad.zero_()  # 0 times infinite would be no 0 on the other ranks
            self._untouched.discard(name)
            self._exchange.add(name, _local_gradient(parameter), is_kept=is_kept)

        return add

    @property
    def has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._parameters.values())

    @torch.no_grad()
    def end(self) -> None:
        """Wait for the exchange."""
        is_owed, self._is_running, self.is_owed = self.is_owed, False, False
        for name in self._parameters:
            if name in self._untouched:  # what an earlier backward left there counts, should another rank add to it
                self._exchange.add(name, _local_gradient(self._parameters[name]), is_kept=not is_owed)
        with self._waiting:
            _, sums = self._exchange.wait()
        own: list[Tensor] = []
        packed: list[Tensor] = []
        exchanged = self._backward.exchanged
        for name, parameter in self._parameters.items():
            total = sums[name]
            if total is None:
                continue
            exchanged.add(name)
            if total is parameter.grad:
                continue
            gradient = _local_gradient(parameter)
            if gradient is None:
                own_memory = total if name in self._exchange.made else total.clone()
                parameter.grad = as_dtensor(own_memory, parameter)
            elif total is not gradient:
                own.append(gradient)
                packed.append(total)
        if own:  # one call for all: they are small and many
            torch._foreach_copy_(own, packed)
        if self._backward.discarded is not None:
            self._backward.discarded.note({name: self._parameters[name].grad for name in sums if name in exchanged})


def _local_gradient(parameter: Tensor) -> Tensor | None:
    return None if parameter.grad is None else local_of(parameter.grad)
