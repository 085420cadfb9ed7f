"""The actions of one step on one rank, with real tensors.

    forward of (chunk, micro-batch)     take values -> module -> send values          keeps inputs and outputs
    backward                            take gradients -> autograd -> send gradients  lets them go
    backward_input, backward_weight     the same in two halves, see put_off

A value that comes from another stage is a leaf of this stage's autograd graph, and its gradient is what goes back.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from weft.distributed.codecs.activations import AbstractWireFormat
from weft.distributed.placement.pipeline.actions import Action
from weft.distributed.placement.pipeline.completion import AbstractCompletion
from weft.distributed.placement.pipeline.put_off import Postponement, PutOff
from weft.distributed.placement.pipeline.stages import INPUT, StageProgram
from weft.distributed.placement.pipeline.transport import Transport
from weft.distributed.placement.pipeline.wiring import RANDOM, Edge, Wiring
from weft.graph import Loss
from weft.graph.executors.random_state import get_random_state, use_random_state
from weft.specs import Batch
from weft.training.weighting import use_weight_of_loss

__all__ = ["Charge", "MicroBatch", "RankOfPipeline", "Step"]

AHEAD = 3
"""Actions whose receives are posted before their turn comes."""

Charge = Callable[[Action, int], None]
"""Lets the time of an action pass, of so many samples, where time is virtual."""


@dataclass(frozen=True)
class MicroBatch:
    """A part of a replica's share of a batch.

    Args:
        weight: of its mean in that of the share; those of all micro-batches sum to 1.
        random: the state that its generators begin with.
        key: its form: the shapes and types of its inputs, and whether it is for training.
    """

    batch: Batch
    weight: float
    random: Tensor
    key: Hashable


@dataclass(frozen=True)
class RankOfPipeline:
    """The constant parts of a rank: its chunks by number (counted over all stages), and how they reach the others.

    Args:
        trained: of each chunk, its trainable parameters by name.
        context: around forward passes; autocast.
        wire_format: in which values and gradients travel.
        postponements: of each chunk, for backward passes in two halves.
    """

    stage: int
    num_stages: int
    programs: tuple[StageProgram, ...]
    trained: tuple[dict[str, Tensor], ...]
    wiring: Wiring
    loss: Loss
    device: torch.device
    context: Callable[[], AbstractContextManager[Any]]
    wire_format: AbstractWireFormat
    postponements: tuple[Postponement, ...] = ()

    def number(self, chunk: int) -> int:
        return chunk * self.num_stages + self.stage

    def is_here(self, number: int) -> bool:
        return number % self.num_stages == self.stage


@dataclass
class _Passage:
    """A micro-batch between its forward and its last backward pass through a chunk."""

    leaves: dict[str, Tensor] = field(default_factory=dict)  # of values whose gradient is wanted, by id
    roots: dict[str, Tensor] = field(default_factory=dict)  # outputs that need a gradient, by id
    gradients: list[Tensor] = field(default_factory=list)  # of the roots, where all is done in the second half
    put_off: PutOff = field(default_factory=PutOff)


@final
class Step:
    """One call of the executor: all micro-batches through this rank's chunks.

    Args:
        completion: of gradients; None for a forward pass alone.
        charge: before the tensors of an action are computed, so that they leave when its time is over.
    """

    def __init__(
        self,
        rank: RankOfPipeline,
        transport: Transport,
        micros: Sequence[MicroBatch] | Mapping[int, MicroBatch],
        completion: AbstractCompletion | None,
        charge: Charge,
    ) -> None:
        self._rank, self._transport, self._micros = rank, transport, micros
        self._completion = completion
        self._charge = charge
        self._names = [{id(p): name for name, p in own.items()} for own in rank.trained]
        self._has_halves = False  # whether backward passes are in two halves
        self._passages: dict[tuple[int, int], _Passage] = {}  # by chunk and micro-batch
        self._local: dict[tuple[int, int], Tensor] = {}  # values that stay on this rank, by edge and micro-batch
        self._local_gradients: dict[tuple[int, int], Tensor] = {}
        self.losses: list[Tensor] = []
        self.predictions: list[Any] = []  # tensors, or structures of them
        self.first_bad: str | None = None
        """Of what a stage was sent when its loss was not finite, the first value that was not."""

    def run(self, actions: Sequence[Action]) -> None:
        last = {a.chunk: i for i, a in enumerate(actions) if a.kind in ("backward", "backward_weight")}
        self._has_halves = any(action.kind == "backward_weight" for action in actions)
        posted = 0
        for i, action in enumerate(actions):
            posted = self._post_ahead(actions, max(posted, i), i + AHEAD)
            is_last = last.get(action.chunk) == i
            match action.kind:
                case "forward":
                    self._forward(action)
                case "backward":
                    self._backward(action, is_last=is_last)
                case "backward_input":
                    self._backward_input(action)
                case "backward_weight":
                    self._backward_weight(action, is_last=is_last)

    def _post_ahead(self, actions: Sequence[Action], begin: int, end: int) -> int:
        """Receives in the order of actions, so that those of one edge come in the order of micro-batches; up to the
        first whose form is not known."""
        for i in range(begin, min(end, len(actions))):
            action = actions[i]
            number, micro = self._rank.number(action.chunk), action.micro
            key = self._micros[micro].key
            if action.kind == "forward":
                edges = [edge for edge in self._rank.wiring.into(number) if not self._rank.is_here(edge.producer)]
                is_known = all(self._transport.expect(edge, key, micro) for edge in edges)
            elif action.kind == "backward_weight":
                is_known = True
            else:
                edges = [edge for edge in self._values_out_of(number) if not self._rank.is_here(edge.consumer)]
                is_known = all(self._transport.expect_gradient(edge, key, micro) for edge in edges)
            if not is_known:
                return i
        return max(begin, min(end, len(actions)))

    # Forward.

    def _forward(self, action: Action) -> None:
        rank, micro = self._rank, self._micros[action.micro]
        number = rank.number(action.chunk)
        passage = self._passages[action.chunk, action.micro] = _Passage()
        values, random = self._take_values(number, action.micro, passage)
        program = rank.programs[action.chunk]
        arguments = [
            _input(micro.batch, value) if value.startswith(INPUT) else values[value] for value in program.inputs
        ]
        self._charge(action, len(micro.batch))
        with use_random_state(random, rank.device):
            with rank.context(), use_weight_of_loss(micro.weight), self._putting_off(action.chunk, passage):
                outputs = program.module(*arguments)
                if number == rank.wiring.num_chunks - 1:
                    outputs = (self._lose(outputs, micro, values),)
            after = get_random_state(rank.device)
        made = dict(zip(program.outputs, outputs, strict=True))
        if self._completion is None:
            del self._passages[action.chunk, action.micro]
        else:
            passage.roots = {value: tensor for value, tensor in made.items() if tensor.requires_grad}
        for edge in rank.wiring.out_of(number):
            if edge.value == RANDOM:
                # Not sent where nothing was drawn: the next stage knows what the micro-batch began with.
                is_drawn = not torch.equal(after, micro.random)
                self._give(edge, action.micro, after if is_drawn else None)
            else:
                self._give(edge, action.micro, made[edge.value])

    def _take_values(self, number: int, micro: int, passage: _Passage) -> tuple[dict[str, Tensor], Tensor]:
        """The values that a chunk needs, and the state of the generators."""
        values: dict[str, Tensor] = {}
        random = self._micros[micro].random
        for edge in self._rank.wiring.into(number):
            found, requires_grad = self._take(edge, micro)
            if edge.value == RANDOM:
                random = random if found is None else found
                continue
            assert found is not None, "a value that a chunk takes is sent"
            if requires_grad and self._completion is not None:
                passage.leaves[edge.value] = found.requires_grad_()
                found = _enter(found)
            values[edge.value] = found
        return values, random

    def _take(self, edge: Edge, micro: int) -> tuple[Tensor | None, bool]:
        if not self._rank.is_here(edge.producer):
            value, form = self._transport.take(edge, self._micros[micro].key, micro)
            return value, form.requires_grad
        own = self._local.pop((edge.index, micro), None)
        return (None, False) if own is None else (own.detach().clone(), own.requires_grad)

    def _give(self, edge: Edge, micro: int, value: Tensor | None) -> None:
        if not self._rank.is_here(edge.consumer):
            self._transport.send(edge, self._micros[micro].key, value)
        elif value is not None:
            self._local[edge.index, micro] = value

    def _lose(self, outputs: Any, micro: MicroBatch, values: dict[str, Tensor]) -> Tensor:
        """The loss of a micro-batch, from the output of the last chunk."""
        (predictions,) = outputs
        if isinstance(predictions, Tensor):
            self.predictions.append(predictions.detach())
        elif self._completion is None:
            self.predictions.append(predictions)  # a structure; of training nobody asks for it
        if self._completion is None:
            return torch.zeros(())  # the loss of an evaluation is that of the whole batch
        loss = self._rank.loss(predictions, *micro.batch.targets)
        self.losses.append(loss.detach() * micro.weight)
        if not torch.isfinite(loss.detach()) and self.first_bad is None:
            self.first_bad = next((name for name, value in values.items() if not value.isfinite().all()), None)
        return loss

    # Backward.

    def _backward(self, action: Action, *, is_last: bool) -> None:
        completion = self._completion
        assert completion is not None, "backward passes are of a training step"
        passage = self._passages.pop((action.chunk, action.micro))
        gradients = self._take_gradients(action, passage)
        self._charge(action, len(self._micros[action.micro].batch))
        if is_last:
            completion.begin_last(action.chunk)
        if passage.roots:
            torch.autograd.backward(list(passage.roots.values()), gradients)
        if is_last:
            completion.end_last(action.chunk)
        self._give_gradients(action, {value: leaf.grad for value, leaf in passage.leaves.items()}, passage)

    def _putting_off(self, chunk: int, passage: _Passage) -> AbstractContextManager[None]:
        """A chunk that nobody waits for has no first half."""
        if self._has_halves and passage.leaves:
            return self._rank.postponements[chunk].use(passage.put_off)
        return nullcontext()

    def _backward_input(self, action: Action) -> None:
        passage = self._passages[action.chunk, action.micro]
        gradients = self._take_gradients(action, passage)
        self._charge(action, len(self._micros[action.micro].batch))
        if not passage.leaves:
            passage.gradients = gradients
        elif passage.roots:
            torch.autograd.backward(list(passage.roots.values()), gradients)
        self._give_gradients(action, {value: leaf.grad for value, leaf in passage.leaves.items()}, passage)
        passage.roots = {} if passage.leaves else passage.roots

    def _backward_weight(self, action: Action, *, is_last: bool) -> None:
        completion = self._completion
        assert completion is not None, "backward passes are of a training step"
        passage = self._passages.pop((action.chunk, action.micro))
        self._charge(action, len(self._micros[action.micro].batch))
        if is_last:
            completion.begin_last(action.chunk)
        if passage.roots:
            torch.autograd.backward(list(passage.roots.values()), passage.gradients)
        for name, grow in passage.put_off.make(self._names[action.chunk]):
            completion.grow(name, grow)
        if is_last:
            completion.end_last(action.chunk)

    def _take_gradients(self, action: Action, passage: _Passage) -> list[Tensor]:
        """Of the roots, each added up over its consumers, in their order."""
        number, micro = self._rank.number(action.chunk), action.micro
        if number == self._rank.wiring.num_chunks - 1:
            return [torch.full_like(root, self._micros[micro].weight) for root in passage.roots.values()]
        sums: dict[str, Tensor] = {}
        for edge in self._values_out_of(number):
            if edge.value not in passage.roots:
                continue
            if self._rank.is_here(edge.consumer):
                gradient = self._local_gradients.pop((edge.index, micro))
            else:
                gradient = self._transport.take_gradient(edge, self._micros[micro].key, micro)
            sums[edge.value] = sums[edge.value] + gradient if edge.value in sums else gradient
        passage.roots = {value: root for value, root in passage.roots.items() if value in sums}
        return [sums[value] for value in passage.roots]

    def _give_gradients(self, action: Action, gradients: dict[str, Tensor | None], passage: _Passage) -> None:
        for edge in self._rank.wiring.into(self._rank.number(action.chunk)):
            if edge.value not in gradients:
                continue
            found = gradients[edge.value]
            gradient = torch.zeros_like(passage.leaves[edge.value]) if found is None else found
            if self._rank.is_here(edge.producer):
                self._local_gradients[edge.index, action.micro] = gradient.detach()
            else:
                self._transport.send_gradient(edge, gradient.detach())

    def _values_out_of(self, number: int) -> list[Edge]:
        return [edge for edge in self._rank.wiring.out_of(number) if edge.value != RANDOM]


def _input(batch: Batch, value: str) -> Tensor:
    return batch.inputs[int(value.removeprefix(INPUT))]


class _Enter(torch.autograd.Function):
    """A leaf's values in a tensor that is no leaf, nor a view of one: a layer may work on it in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.data

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def _enter(leaf: Tensor) -> Tensor:
    entered: Tensor = _Enter.apply(leaf)  # type: ignore[no-untyped-call]
    return entered
