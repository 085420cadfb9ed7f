"""Optimizer state, gradients and parameters split over ranks (ZeRO stages 2 and 3, Rajbhandari et al., 2020).

    2 ranks            stage 2                                  stage 3
    parameters         whole in memory, gathered before         a few blocks whole at a time, the rest in pieces
                       their forward
    gradients          of a block: a reduce-scatter when all of them are there, and only this rank's piece is kept
    optimizer state    of this rank's pieces

Between steps a parameter is its piece, on both: State.parameters holds pieces, and an optimizer updates these.

    bytes that a rank sends in a step, of P bytes of parameters on N ranks (a share of (N - 1) / N of all below)
    stage 2     P (gather) + P (reduce-scatter)      as an all-reduce
    stage 3     2 P + P
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn

from weft.distributed.codecs import Bucket
from weft.distributed.group import AbstractGroup
from weft.distributed.placement.blocks import LEAST_BYTES
from weft.distributed.placement.bucket_cut import BucketCut
from weft.distributed.placement.gathering import GatheredBlocks
from weft.distributed.placement.shards import AbstractShards
from weft.distributed.placement.torch_steps import check_cuttable
from weft.graph import AbstractExecutor, EagerExecutor, GradientSink, Loss, Outputs, State
from weft.specs import Batch
from weft.specs.mesh import Axis
from weft.training.optimizers import AbstractOptimizer, OptimizerState
from weft.training.optimizers.offloading import move_state_to_disk
from weft.training.placement import AbstractPlacement, MakeExecutor, WholeModel

__all__ = ["ShardedModel"]


@final
class ShardedModel(AbstractShards):
    """Every rank has one part of each block's parameters, gradients and optimizer state.

    Args:
        group: the ranks that hold the model together.
        level: 2 or 3, the stage of ZeRO.
        holders: the ranks that together hold every part of the model; by default the group.
        least_bytes: of a block that is gathered alone.
        offloads: the state of optimizers that are taken over goes to disk.
    """

    def __init__(
        self,
        group: AbstractGroup,
        level: int,
        inner: AbstractPlacement | None = None,
        holders: AbstractGroup | None = None,
        least_bytes: int = LEAST_BYTES,
        *,
        offloads: bool = False,
    ) -> None:
        super().__init__(group, inner or WholeModel(), holders)
        self._level = level
        self._offloads = offloads
        self._least_bytes = least_bytes
        self._blocks: GatheredBlocks | None = None

    @property
    def blocks(self) -> GatheredBlocks:
        assert self._blocks is not None, "place() comes first"
        return self._blocks

    @property
    def takes_forwards_together(self) -> bool:
        """Pieces of all ranks are needed in every forward, whoever has samples."""
        return True

    def lies_in_pieces(self, kind: str) -> bool:
        return kind in ("parameter", "slot")

    def copied_over(self, name: str) -> tuple[Axis, ...]:
        return tuple(axis for axis in self._inner.copied_over(name) if axis != "shard")

    def place(self, module: nn.Module) -> nn.Module:
        module = self._inner.place(module)
        shapes = {n: torch.empty_like(p, device="meta").requires_grad_(p.requires_grad) for n, p in _named(module)}
        self._blocks = GatheredBlocks(
            module,
            self._group,
            keeps_memory=self._level == 2,
            key=self.reduced_over,
            least_bytes=self._least_bytes,
        )
        found = {name: flat.piece_of(name) for name, flat in self.blocks.flats.items()}
        self.note_pieces(shapes, {name: piece for name, piece in found.items() if piece is not None})
        return module

    @contextmanager
    def use_whole(self) -> Iterator[None]:
        with self._inner.use_whole(), self.blocks.holding():
            yield

    def execute(self, module: nn.Module, loss: Loss, make: MakeExecutor) -> AbstractExecutor:
        return _GatheringExecutor(self._inner.execute(module, loss, make), self.blocks)

    # The messages of an exchange.

    @property
    def cuts(self) -> tuple[BucketCut, ...]:
        """Of trained parameters, in the order in which backward needs them."""
        flats = [flat for flats in reversed(self.blocks.blocks) for flat in reversed(flats)]
        return tuple(flat.cut for flat in flats if flat.parameters[0].requires_grad)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(cut.bucket for cut in self.cuts)

    # Pieces.

    def owned(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        pieces = self._pieces
        return {name: self.blocks.flats[name].pieces[name] for name in parameters if name in pieces}

    def prepare(
        self, optimizer: AbstractOptimizer, parameters: Mapping[str, Tensor], state: OptimizerState
    ) -> Mapping[str, Tensor]:
        """Each rank looks ahead with its pieces, which are then gathered."""
        owned = self.owned(parameters)
        points = optimizer.prepare(owned, state)
        return parameters if points is owned else {**parameters, **points}

    def take_over(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> None:
        """Its parameters are pieces already."""
        check_cuttable(optimizer)
        if self._offloads:
            optimizer.register_step_post_hook(lambda *_: move_state_to_disk(optimizer))

    def spread(self, tensors: Mapping[str, Tensor]) -> int:
        """The next forward gathers them."""
        return 0


def _named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters())


@final
class _GatheringExecutor(AbstractExecutor):
    """Computes with whole parameters, in a state whose parameters are pieces.

    An executor that calls the module as it is gathers block by block; others read parameters when they like, where they
    were in the last step (programs of graphs), and get all of them: of stage 3 they have the memory of stage 2.
    """

    def __init__(self, inner: AbstractExecutor, blocks: GatheredBlocks) -> None:
        self._inner = inner
        self._blocks = blocks
        self._by_block = isinstance(inner, EagerExecutor)
        if not self._by_block:
            blocks.keep_memory()

    def initial_state(self) -> State:
        return self._inner.initial_state()

    def __call__(self, state: State, batch: Batch, on_gradient: GradientSink) -> tuple[Outputs, State]:
        with self._blocks.computing(by_block=self._by_block):
            return self._inner(state, batch, on_gradient)

    def infer(self, state: State, batch: Batch) -> Outputs:
        with self._blocks.computing(by_block=self._by_block):
            return self._inner.infer(state, batch)

    def first_bad_tensor(self, state: State, batch: Batch) -> str | None:
        """A rank that looks for it is alone, and has no more than pieces."""
        return "not known, as parameters lie in pieces"
