"""Which modules of a model are one piece to a cut: its layers, and the blocks that it repeats.

GPT-2              transformer.wte  transformer.wpe  transformer.h.0  transformer.h.1 ...  transformer.ln_f  lm_head
a ResNet           conv1  bn1  layer1.0  layer1.1  layer2.0 ...  fc

A block is an item of a list of modules. What holds such lists is opened; blocks are, only where a model has fewer
pieces with parameters than there are stages, or one of them weighs as much as two stages.
"""

from collections.abc import Iterator

from torch import nn

__all__ = ["find_blocks"]

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_OPENED = (*_LISTS, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)


def find_blocks(module: nn.Module, num_stages: int) -> dict[str, nn.Module]:
    """Pieces by path, in the order of the model; fine enough for the stages, as far as its modules allow."""
    blocks = dict(_pieces(module))
    while True:
        openable = [path for path, block in blocks.items() if _can_open(block)]
        heaviest = max(openable, key=lambda path: _weight(blocks[path]), default=None)
        if heaviest is None or not _is_too_coarse(module, blocks, heaviest, num_stages):
            return blocks
        opened: dict[str, nn.Module] = {}
        for path, block in blocks.items():
            opened |= dict(_pieces(block, path)) if path == heaviest else {path: block}
        blocks = opened


def _pieces(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Of a module that is opened."""
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        is_block = isinstance(module, _LISTS) and not isinstance(child, _OPENED)
        if not is_block and _is_opened(child):
            yield from _pieces(child, inner)
        else:
            yield inner, child


def _is_opened(module: nn.Module) -> bool:
    if isinstance(module, _OPENED):
        return True
    return not _is_layer(module) and any(isinstance(part, _OPENED) for part in module.modules())


def _is_layer(module: nn.Module) -> bool:
    """One of PyTorch's own."""
    return type(module).__module__.startswith(("torch.nn", "torch.ao.nn")) and not isinstance(module, _OPENED)


def _can_open(module: nn.Module) -> bool:
    return not _is_layer(module) and any(True for _ in module.children())


def _is_too_coarse(module: nn.Module, blocks: dict[str, nn.Module], heaviest: str, num_stages: int) -> bool:
    if sum(_weight(block) > 0 for block in blocks.values()) < num_stages:
        return True
    holds_list = any(isinstance(part, _OPENED) for part in blocks[heaviest].modules())
    return holds_list and _weight(blocks[heaviest]) * num_stages > 2 * _weight(module)


def _weight(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
