"""The module of a rank that has several runs of layers: stages of a pipeline may, if they are interleaved."""

from collections.abc import Iterator
from typing import final

from torch import nn

__all__ = ["Chunks", "chunks_of"]


@final
class Chunks(nn.Module):
    """Several chunks of layers of one rank. Their modules go by the names that they have in the whole model."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(modules)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Those of the chunks, and not the list that holds them."""
        memo = set() if memo is None else memo
        for module in self.chunks:
            yield from module.named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """Of whichever chunk has it."""
        for module in self.chunks:
            try:
                return module.get_submodule(target)
            except AttributeError:
                continue
        raise AttributeError(f"no chunk has the module ({target})")


def chunks_of(module: nn.Module) -> list[nn.Module]:
    """The chunks of a rank's module, which is one as a rule: values pass between them as between stages."""
    return list(module.chunks) if isinstance(module, Chunks) else [module]
