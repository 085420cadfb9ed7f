"""Values and gradients between stages: sent without waiting, received ahead of time, nothing pickled.

    stage 0   [ F 0 ][ F 1 ][ F 2 ]                        a value leaves as soon as it is there; the receive for
                   `-----.`-----.                          it was posted while the stage before still computed
    stage 1              [ F 0 ][ B 0 ][ F 1 ] ...

Shapes may change from step to step. All ranks of a replica see the same batch, so all know when a micro-batch has a
form that it never had: then, and only then, a header with the shape goes before the value.

    header   [ is there, requires a gradient, type, number of dims, dims ... ]     whole numbers

Values and gradients are packed in the wire format of the plan (`activations`), and unpacked where they arrive.

Where stages are split in different ways, every rank receives from the rank that stands for it in the other stage:

    stage 0  [ r0 ]          values      r0 -> r1, r0 -> r2
    stage 1  [ r1 r2 ]       gradients   r1 -> r0                  those of r1 and r2 are equal
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs.activations import AbstractWireFormat, empty_message, pack, unpack
from weft.distributed.group import AbstractGroup, AbstractWork
from weft.distributed.group.calls import Recv, Send
from weft.distributed.placement.pipeline.wiring import RANDOM, Edge, Wiring
from weft.errors import UsageError
from weft.specs import CPU, Mesh

__all__ = ["Form", "Transport"]

MOST_DIMS = 12
TYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


@dataclass(frozen=True)
class Form:
    """Shape and type of a value, and whether its gradient is wanted; None for a value that is not sent."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype = torch.uint8
    requires_grad: bool = False

    @staticmethod
    def of(tensor: Tensor | None) -> "Form":
        return Form(None) if tensor is None else Form(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def pack(self) -> Tensor:
        numbers = [0] if self.shape is None else [1, self.requires_grad, TYPES.index(self.dtype), len(self.shape)]
        numbers += self.shape or ()
        return torch.tensor(numbers + [0] * (4 + MOST_DIMS - len(numbers)))

    @staticmethod
    def unpack(header: Tensor) -> "Form":
        is_there, requires_grad, dtype, dims, *shape = header.tolist()
        return Form(tuple(shape[:dims]), TYPES[dtype], bool(requires_grad)) if is_there else Form(None)


@final
class Transport:
    """One rank's side of all edges.

    Args:
        group: all ranks of the mesh.
        device: where values lie.
        wire_format: in which they travel.
    """

    def __init__(
        self,
        group: AbstractGroup,
        mesh: Mesh,
        wiring: Wiring,
        device: torch.device,
        wire_format: AbstractWireFormat,
    ) -> None:
        self._group = group
        self._format = wire_format
        self._mesh = mesh
        self._own = mesh.coordinate("pipeline")
        self._num_edges = len(wiring.edges)
        self._device = device
        self._sources = [mesh.rank_in(stage) for stage in range(mesh.pipeline)]
        self._targets = [self._served_in(stage) for stage in range(mesh.pipeline)]
        self._forms: dict[tuple[int, Hashable], Form] = {}  # by edge and the form of a micro-batch
        self._receiving: dict[tuple[int, int], tuple[AbstractWork, Tensor, Form]] = {}  # by tag and micro-batch
        self._sending: list[AbstractWork] = []
        self.waited = 0.0
        """Seconds that this rank has waited for others, since it was set to 0."""
        self.num_bytes = 0
        """Of values and gradients that it has sent."""

    # Values, from earlier chunks to later ones.

    def send(self, edge: Edge, key: Hashable, value: Tensor | None) -> None:
        """To all ranks of the consumer's stage that this rank stands for.

        Args:
            key: the form of the micro-batch, which all ranks of the replica know.
        """
        form = Form.of(value)
        peers = self._peers(edge.consumer)
        known = self._forms.setdefault((edge.index, key), form)
        if known is form:
            header = form.pack()
            self._sending += [self._group.start(Send(header, peer, self._header_tag(edge))) for peer in peers]
        elif known != form:
            raise UsageError(
                f"value between stages has another form for inputs of the same shape (value: {edge.value}, was: "
                f"{_tell(known)}, is: {_tell(form)}); make it the same for the same shape, or use fewer stages"
            )
        if value is not None:
            self._send(value, peers, edge.index)

    def expect(self, edge: Edge, key: Hashable, micro: int) -> bool:
        """Post the receive of a value, if its form is known."""
        form = self._forms.get((edge.index, key))
        if form is None:
            return False
        self._post(edge.index, micro, form, self._peer(edge.producer), is_random=edge.value == RANDOM)
        return True

    def take(self, edge: Edge, key: Hashable, micro: int) -> tuple[Tensor | None, Form]:
        """Wait for a value."""
        if (edge.index, key) not in self._forms:
            header = Form(None).pack()
            work = self._group.start(Recv(header, self._peer(edge.producer), self._header_tag(edge)))
            self._wait(work)
            self._forms[edge.index, key] = Form.unpack(header)
        self.expect(edge, key, micro)
        return self._finish(edge.index, micro), self._forms[edge.index, key]

    # Gradients, back.

    def send_gradient(self, edge: Edge, gradient: Tensor) -> None:
        self._send(gradient, self._peers(edge.producer), self._gradient_tag(edge))

    def expect_gradient(self, edge: Edge, key: Hashable, micro: int) -> bool:
        """Post the receive of a gradient, if the form of its value is known."""
        form = self._forms.get((edge.index, key))
        if form is None:
            return False
        if form.requires_grad:
            self._post(self._gradient_tag(edge), micro, form, self._peer(edge.consumer))
        return True

    def take_gradient(self, edge: Edge, key: Hashable, micro: int) -> Tensor:
        self.expect_gradient(edge, key, micro)
        gradient = self._finish(self._gradient_tag(edge), micro)
        assert gradient is not None, "whoever asks for a gradient has sent the value"
        return gradient

    # Sums over stages.

    def exchange(self, tensors: dict[int, tuple[Tensor, tuple[int, ...]]]) -> dict[int, list[Tensor]]:
        """Tensors by number, each with the stages that have one of the same number; those of all stages, in the order
        of stages."""
        received: dict[tuple[int, int], tuple[AbstractWork, Tensor]] = {}
        for number, (tensor, stages) in tensors.items():
            tag = 3 * self._num_edges + number
            for stage in stages:
                if stage != self._own:
                    self._sending += [self._group.start(Send(tensor, peer, tag)) for peer in self._targets[stage]]
                    other = torch.empty_like(tensor)
                    received[number, stage] = (self._group.start(Recv(other, self._sources[stage], tag)), other)
        for work, _ in received.values():
            self._wait(work)
        return {
            number: [tensor if stage == self._own else received[number, stage][1] for stage in stages]
            for number, (tensor, stages) in tensors.items()
        }

    def flush(self) -> None:
        """Wait until everything that was sent has left: its memory is then free."""
        assert not self._receiving, "every receive that was posted was for an action"
        works, self._sending = self._sending, []
        for work in works:
            self._wait(work)

    def tidy(self) -> None:
        """Let go of what has left."""
        self._sending = [work for work in self._sending if not work.is_done()]

    def _send(self, tensor: Tensor, peers: list[int], tag: int) -> None:
        message = pack(self._format, tensor)
        self.num_bytes += message.nbytes * len(peers)
        self._sending += [self._group.start(Send(message, peer, tag)) for peer in peers]

    def _post(self, tag: int, micro: int, form: Form, peer: int, *, is_random: bool = False) -> None:
        if form.shape is None or (tag, micro) in self._receiving:
            return
        message = empty_message(self._format, form.shape, form.dtype, CPU if is_random else self._device)
        self._receiving[tag, micro] = (self._group.start(Recv(message, peer, tag)), message, form)

    def _finish(self, tag: int, micro: int) -> Tensor | None:
        found = self._receiving.pop((tag, micro), None)
        if found is None:
            return None
        work, message, form = found
        self._wait(work)
        assert form.shape is not None, "nothing else is received"
        return unpack(self._format, message, form.shape, form.dtype)

    def _wait(self, work: AbstractWork) -> None:
        began = self._group.clock.now()
        work.wait()
        self.waited += self._group.clock.now() - began

    def _peer(self, number: int) -> int:
        return self._sources[number % len(self._sources)]

    def _peers(self, number: int) -> list[int]:
        return self._targets[number % len(self._targets)]

    def _served_in(self, stage: int) -> list[int]:
        """The ranks of a stage that receive from this one."""
        ranks = self._mesh.ranks_in(stage)
        return [rank for rank in ranks if replace(self._mesh, rank=rank).rank_in(self._own) == self._mesh.rank]

    def _gradient_tag(self, edge: Edge) -> int:
        return self._num_edges + edge.index

    def _header_tag(self, edge: Edge) -> int:
        return 2 * self._num_edges + edge.index


def _tell(form: Form) -> str:
    return "not sent" if form.shape is None else f"{str(form.dtype).removeprefix('torch.')} {list(form.shape)}"
