"""Parameters that lie in pieces, gathered block by block as a step needs them (ZeRO stages 2 and 3).

    stage 3     forward                                 backward
    block 1     [gather][compute] let go                            [gather][compute] let go
    block 2             [gather][compute] kept, for backward begins here [compute] let go
    own block   [gather] ......................... whole to the end of the step ..........
                         the next block is under way while this one computes

    stage 2     a block is gathered before its forward, and stays whole to the end of the step

Autograd keeps views of weights for backward. Under stage 3 it keeps notes of them in their place (pack), and they are
made anew from what is gathered when backward asks for them (unpack): so a block is there whenever it is needed, in
whatever order backward goes, and the memory of one block is soon that of another.
"""

from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

from weft.distributed.codecs import bucket_of
from weft.distributed.group.group import AbstractGroup
from weft.distributed.placement.blocks import LEAST_BYTES, Block, find_blocks
from weft.distributed.placement.bucket_cut import cut_bucket
from weft.distributed.placement.flats import Flat, MemoryPool

__all__ = ["GatheredBlocks"]

ALIGNMENT = 16
"""Elements: parameters of a multiple of it come first in a block, so that they begin where kernels like it."""

OWN = 0
"""The index of the model's own block."""


@dataclass(frozen=True)
class _Note:
    """A view of gathered memory, in its place among what autograd keeps."""

    flat: Flat
    block: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@final
class GatheredBlocks:
    """The parameters of a module, cut over the ranks of a group when this is made. Hooks on its blocks work while
    `computing` is entered.

    Args:
        keeps_memory: of whole parameters, from step to step (stage 2); else of a few blocks at a time (stage 3).
        key: of a name; parameters with different keys do not lie together.
    """

    def __init__(
        self,
        module: nn.Module,
        group: AbstractGroup,
        *,
        keeps_memory: bool,
        key: Callable[[str], Hashable] = lambda name: None,
        least_bytes: int = LEAST_BYTES,
    ) -> None:
        self._keeps_memory = keeps_memory
        parameters = dict(module.named_parameters())
        blocks = find_blocks(module, least_bytes)
        largest = max(sum(parameters[name].nbytes for name in block.names) for block in blocks)
        self.pool = MemoryPool(2 * largest)
        self.blocks = [
            _flats_of(block, parameters, group, key, None if keeps_memory else self.pool) for block in blocks
        ]
        self.flats = {name: flat for flats in self.blocks for flat in flats for name in flat.names}
        self.parameters = parameters
        self._by_memory: dict[int, tuple[Flat, int]] = {}  # of what is whole now
        self._is_computing = self._is_backward = self._is_held = False
        self.attached: list[tuple[MutableMapping[Any, Any], int]] = []  # hooks of modules
        self.waiting: AbstractContextManager[object] = nullcontext()
        """Entered while this rank waits for the others."""
        for index, block in enumerate(blocks):
            for part in block.modules:
                self._hook(part, index)

    def keep_memory(self) -> None:
        """Of whole parameters, from now on, for whoever looks for them where they were in the last step."""
        self._keeps_memory = True
        for flats in self.blocks:
            for flat in flats:
                flat.keep_memory()

    @contextmanager
    def computing(self, *, by_block: bool = True) -> Iterator[None]:
        """A forward, and the backward that follows it.

        Args:
            by_block: a block is gathered when a module of it is called; else all are at once, and stay.
        """
        try:
            self.begin(by_block=by_block)
            with self.noting() if by_block else nullcontext():
                yield
        except BaseException:
            self.end(failed=True)
            raise
        self.end()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """All parameters are whole, and nobody needs the others to compute. All ranks enter it."""
        was_held = self._is_held
        if not was_held:
            self.begin(by_block=False)
            self._is_held = True
        try:
            yield
        finally:
            self._is_held = was_held
            self.end()

    def noting(self) -> AbstractContextManager[object]:
        """To be entered in forward: of what autograd keeps, views of weights are noted."""
        is_plain = self._keeps_memory or self._is_held
        return nullcontext() if is_plain else saved_tensors_hooks(self.pack, self.unpack)

    def begin(self, *, by_block: bool = True) -> None:
        """A forward comes, after another one maybe."""
        if self._is_held:
            return
        self._is_computing, self._is_backward = by_block, False
        for index in [OWN] if by_block else range(len(self.blocks)):
            self._ask(index)
        for index in [OWN] if by_block else range(len(self.blocks)):
            self._wait(index)
        if by_block:
            self._ask(OWN + 1)

    def resume(self) -> None:
        """A backward comes, be it after the end of a step."""
        if not self._is_computing and not self._keeps_memory:
            for flats in self.blocks:
                for flat in flats:
                    flat.let_go()
        self._is_computing = True
        for index in range(len(self.blocks)) if self._keeps_memory else [OWN, len(self.blocks) - 1]:
            self._needed_back(index)

    def end(self, *, failed: bool = False) -> None:
        """Pieces are all that is left. After a failure nobody waits for others, who may never come."""
        if self._is_held:
            return
        self._is_computing = False
        self._by_memory.clear()
        for flats in self.blocks:
            for flat in flats:
                if failed:
                    flat.forget()
                flat.lay_pieces()
        self.pool.clear()

    def memory(self) -> list[Tensor]:
        """That it has now: of pieces, of wholes, and what waits for the next block."""
        flats = [flat for flats in self.blocks for flat in flats]
        return [*self.pool.memory(), *(tensor for flat in flats for tensor in flat.memory())]

    # Gathering.

    def need(self, index: int, towards: int) -> None:
        """A block is whole when this returns, and the next one in this direction is under way."""
        self._ask(index)
        self._wait(index)
        self._ask(index + towards)

    def _ask(self, index: int) -> None:
        if 0 <= index < len(self.blocks):
            for flat in self.blocks[index]:
                if not flat.is_asked_for:
                    flat.ask()

    def _wait(self, index: int) -> None:
        for flat in self.blocks[index]:
            if not flat.is_whole:
                with self.waiting:
                    flat.wait()
                assert flat.whole is not None
                self._by_memory[flat.whole.untyped_storage().data_ptr()] = (flat, index)

    def _let_go(self, index: int) -> None:
        if self._keeps_memory or self._is_held or index == OWN:
            return
        for flat in self.blocks[index]:
            if flat.whole is not None:
                self._by_memory.pop(flat.whole.untyped_storage().data_ptr(), None)
            flat.let_go()

    # Forward.

    def _hook(self, module: nn.Module, index: int) -> None:
        before = module.register_forward_pre_hook(lambda *_: self._before(index))
        after = module.register_forward_hook(lambda _module, _inputs, outputs: self._after(index, outputs))
        self.attached += [(module._forward_pre_hooks, before.id), (module._forward_hooks, after.id)]

    def _before(self, index: int) -> None:
        if self._is_computing:
            self.need(index, 0 if self._is_backward else 1)

    def _after(self, index: int, outputs: Any) -> Any:
        if not self._is_computing or self._keeps_memory:
            return None
        outputs = tree_map_only(Tensor, self._outlast, outputs)
        if torch.is_grad_enabled():
            for tensor in tree_leaves(outputs):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _gradient: self._needed_back(index))
            # Backward begins with the last block; and one that is computed anew in it has its backward next.
            if index == len(self.blocks) - 1 or self._is_backward:
                return outputs
        self._let_go(index)
        return outputs

    def _outlast(self, tensor: Tensor) -> Tensor:
        """An output that is a view of a weight must stay when the weight is let go."""
        is_view = tensor.untyped_storage().data_ptr() in self._by_memory
        return tensor.clone() if is_view else tensor

    # Backward.

    def pack(self, tensor: Tensor) -> Any:
        found = self._by_memory.get(tensor.untyped_storage().data_ptr())
        if found is None:
            return tensor
        flat, index = found
        if tensor.dtype != flat.cut.bucket.dtype:
            return tensor.clone()
        return _Note(flat, index, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, kept: Any) -> Any:
        if not isinstance(kept, _Note):
            return kept
        self._needed_back(kept.block)
        assert kept.flat.whole is not None, "just gathered"
        return kept.flat.whole.as_strided(kept.size, kept.stride, kept.offset)

    def _needed_back(self, index: int) -> None:
        self._is_backward = True
        if index != OWN:  # which is needed all the time
            for other in range(index + 1, len(self.blocks)):
                self._let_go(other)
        self.need(index, -1 if index != OWN else 0)


def _flats_of(
    block: Block,
    parameters: dict[str, nn.Parameter],
    group: AbstractGroup,
    key: Callable[[str], Hashable],
    pool: MemoryPool | None,
) -> Sequence[Flat]:
    """One for each type of what is trained and what is not."""
    by_kind: dict[Hashable, list[str]] = {}
    for name in block.names:
        parameter = parameters[name]
        by_kind.setdefault((parameter.dtype, parameter.requires_grad, key(name)), []).append(name)
    flats: list[Flat] = []
    for names in by_kind.values():
        names.sort(key=lambda name: parameters[name].numel() % ALIGNMENT != 0)
        own = {name: parameters[name].detach().contiguous() for name in names}
        flats.append(Flat(group, cut_bucket(bucket_of(own), own, group.size), parameters, pool))
    return flats
