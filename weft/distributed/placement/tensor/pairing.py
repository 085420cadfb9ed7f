"""Which layers of a model are split, and how: by hand, by the table of blocks, or in pairs of an nn.Sequential.

    nn.Sequential    Linear   ReLU   Dropout   Linear   ReLU   Linear
                     column  --------------->  row             whole: nothing to pair it with
                     Conv2d   BatchNorm2d   ReLU   MaxPool2d   Conv2d   BatchNorm2d
                     channels  channels  ------------------->  row      whole

What is given by hand goes first; a block or a pair of which one layer is taken is then left as it is.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, cast, get_args

from torch import nn

from weft.distributed.placement.rules import NO_RULES, Rules
from weft.distributed.placement.tensor.rules import Block, LayerRule, Split, find_block, find_rule, splits_of
from weft.errors import PlanError

__all__ = ["BlockSplit", "LayerSplit", "Splits", "find_splits", "size_of"]

ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid),
    *(nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Dropout, nn.Identity),
)
BY_CHANNEL = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.Dropout2d)
CONVS, NORMS = (nn.Conv1d, nn.Conv2d, nn.Conv3d), (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

_LAYER_WORDS = frozenset(get_args(Split)) - {"whole", "heads"}
"""Those of rules for one layer."""


@dataclass(frozen=True)
class LayerSplit:
    """A layer, and how it is split.

    Args:
        fused: matrices side by side in it, each of which is split (query, key, value: 3).
        shares_input: others are split by outputs and take the same input: its gradients are added up once, for all.
        gathers: whether its output, which comes in parts, is put together at once.
        by_hand: asked for by name, so that what cannot be done is refused.
    """

    name: str
    module: nn.Module
    rule: LayerRule
    fused: int = 1
    shares_input: bool = False
    gathers: bool = False
    by_hand: bool = False


@dataclass(frozen=True)
class BlockSplit:
    """A block whose layers are split."""

    name: str
    module: nn.Module
    block: Block


@dataclass(frozen=True)
class Splits:
    layers: tuple[LayerSplit, ...]
    blocks: tuple[BlockSplit, ...]


def find_splits(
    model: nn.Module, num_parts: int, rules: Rules = NO_RULES, is_taken: Callable[[str], bool] = lambda name: False
) -> Splits:
    """Of all layers that can be split in so many parts.

    Args:
        is_taken: whether a parameter, by its name, is split on another axis already; its layer is left as it is.

    Raises:
        PlanError: a layer cannot be split as asked.
    """
    taken = {name for name, module in model.named_modules() if _is_split(name, module, is_taken)}
    known = [(name, module, block) for name, module in model.named_modules() if (block := find_block(module))]
    layers = {row.name: row for row in _by_hand(model, rules, taken, [name for name, _, b in known if b.heads])}
    taken |= layers.keys() | {name for name, _ in model.named_modules() if rules.word_of(name) == "whole"}
    blocks: list[BlockSplit] = []
    for name, module, block in known:
        found = _layers_of(name, module, block, num_parts) if name not in taken else []
        if found and not any(row.name in taken for row in found):
            layers |= {row.name: row for row in found}
            blocks.append(BlockSplit(name, module, block))
    for name, module in model.named_modules():
        if isinstance(module, nn.Sequential):
            for pair in _pairs_of(name, module, taken | layers.keys()):
                if _is_large(pair, num_parts):
                    layers |= {row.name: row for row in pair}
    order = [name for name, _ in model.named_modules() if name in layers]
    return Splits(tuple(layers[name] for name in order), tuple(blocks))


def _is_split(name: str, module: nn.Module, is_taken: Callable[[str], bool]) -> bool:
    return any(is_taken(f"{name}.{own}".lstrip(".")) for own in module._parameters)


# By hand.


def _by_hand(model: nn.Module, rules: Rules, taken: Collection[str], attentions: Sequence[str]) -> list[LayerSplit]:
    """Layers whose names a rule fits; heads are those of a block that is known to be an attention."""
    found: list[LayerSplit] = []
    weighted = [(name, m) for name, m in model.named_modules() if m._parameters and name not in taken]
    for name, module in weighted:
        word = rules.word_of(name)
        is_inside = any(name.startswith(f"{above}.") for above in attentions)
        if word not in {*_LAYER_WORDS, "heads"} or (word == "heads" and is_inside):
            continue
        rule = find_rule(module, cast(Split, word)) if word != "heads" else None
        if rule is not None:
            found.append(LayerSplit(name, module, rule, by_hand=True))
        elif any(fnmatchcase(name, glob) for glob, own in rules.rows if own == word):
            what = f"{name}: {type(module).__name__}, asked: {word}"
            ways = ", ".join(way for way in splits_of(module) if way != "heads") or "none, leave it whole"
            raise PlanError(f"layer cannot be split as asked ({what}); ways that work: {ways}")
    for way in sorted(_LAYER_WORDS):
        rules.check_names(way, [name for name, module in weighted if way in splits_of(module)])
    rules.check_names("heads", attentions)
    names = [name for name, _ in weighted]
    families = {row.name: [other for other in found if _are_siblings(model, row, other)] for row in found}
    return [
        replace(row, gathers=_is_alone(row, found, names, families[row.name]), shares_input=len(families[row.name]) > 1)
        for row in found
    ]


def _are_siblings(model: nn.Module, one: LayerSplit, other: LayerSplit) -> bool:
    """Whether two layers are split by outputs and beside each other, as queries, keys and values are."""
    parent = one.name.rpartition(".")[0]
    is_chain = isinstance(model.get_submodule(parent), nn.Sequential)
    if one is other or parent != other.name.rpartition(".")[0] or one.rule is not other.rule or is_chain:
        return one is other
    return one.rule.gives == "part" != one.rule.takes and _num_inputs(one) == _num_inputs(other)


def _num_inputs(row: LayerSplit) -> int:
    weight: Any = row.module.weight
    return int(weight.shape[1 - row.rule.dims["weight"]])


def _is_alone(
    row: LayerSplit, found: Sequence[LayerSplit], weighted: Sequence[str], family: Sequence[LayerSplit]
) -> bool:
    """Whether the next layer with weights, beside those that take the same input, takes no parts of its size."""
    if row.rule.gives != "part" or row.rule.takes == "part":
        return False
    by_name = {other.name: other for other in found}
    for name in weighted[weighted.index(row.name) + 1 :]:
        other = by_name.get(name)
        if other is not None and (other in family or other.rule.takes == "part" == other.rule.gives):
            continue  # a norm of parts is on the way too
        return other is None or other.rule.takes != "part" or size_of(other) != size_of(row)
    return True


# Blocks of the table.


def _layers_of(name: str, module: nn.Module, block: Block, num_parts: int) -> list[LayerSplit]:
    found: list[LayerSplit] = []
    for below, split in block.layers.items():
        layer = _find(module, below)
        rule = find_rule(layer, split) if isinstance(layer, nn.Module) else None
        if rule is not None:
            found.append(LayerSplit(f"{name}.{below}".lstrip("."), cast(nn.Module, layer), rule))
    if block.heads:
        _check_heads(name, module, block, num_parts)
    width = next((size_of(row) for row in found if row.rule.split == "row"), 0)
    entries = [row for row in found if row.rule.takes == "whole" and row.rule.gives == "part" and row.rule.backward]
    return [
        replace(row, fused=max(1, size_of(row) // width), shares_input=len(entries) > 1) if row in entries else row
        for row in found
        if row.rule.split != "vocabulary" or size_of(row) >= num_parts
    ]


def _check_heads(name: str, module: nn.Module, block: Block, num_parts: int) -> None:
    heads = int(_find(module, block.heads))
    if heads % num_parts:
        fits = max(n for n in range(1, num_parts + 1) if heads % n == 0)
        what = f"{name or type(module).__name__}: heads: {heads}, tensor: {num_parts}"
        cure = f"use tensor={fits}" if fits > 1 else "use data=N, or leave it whole by a rule"
        raise PlanError(f"heads of an attention cannot be dealt out evenly ({what}); {cure}")


def _find(module: nn.Module, path: str) -> Any:
    found: Any = module
    for word in path.split("."):
        found = getattr(found, word, None)
    return found


# Pairs.


def _pairs_of(name: str, sequence: nn.Sequential, taken: Collection[str]) -> Iterator[list[LayerSplit]]:
    first: tuple[str, nn.Module] | None = None
    between: list[tuple[str, nn.Module]] = []
    for below, layer in sequence.named_children():
        path = f"{name}.{below}".lstrip(".")
        if path in taken:
            first = None
        elif _is_linear(layer) or _is_conv(layer):
            if first is not None and _fit(first[1], layer):
                split: Split = "channels" if _is_conv(layer) else "column"
                yield [
                    _split(*first, split),
                    *(_split(*norm, "channels") for norm in between),
                    _split(path, layer, "row"),
                ]
                first = None
            else:
                first = path, layer
            between = []
        elif first is not None and isinstance(layer, NORMS) and _is_conv(first[1]):
            between.append((path, layer))
        elif not isinstance(layer, (*ELEMENTWISE, *BY_CHANNEL)) or (
            isinstance(layer, BY_CHANNEL) and first is not None and not _is_conv(first[1])
        ):
            first = None


def _split(name: str, module: nn.Module, split: Split) -> LayerSplit:
    rule = find_rule(module, split)
    assert rule is not None, "the table has every layer that is paired"
    return LayerSplit(name, module, rule)


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear)


def _is_conv(layer: nn.Module) -> bool:
    return isinstance(layer, CONVS) and layer.groups == 1


def _fit(first: Any, second: Any) -> bool:
    if _is_linear(first) and _is_linear(second):
        return bool(first.out_features == second.in_features)
    return _is_conv(first) and _is_conv(second) and bool(first.out_channels == second.in_channels)


def _is_large(pair: list[LayerSplit], num_parts: int) -> bool:
    return all(size_of(row) >= num_parts for row in pair)


def size_of(row: LayerSplit) -> int:
    """The length of the dim that is cut."""
    tensor: Any = getattr(row.module, "weight", None)
    if tensor is None:  # a norm without parameters
        return int(cast(Any, row.module).num_features)
    return int(tensor.shape[row.rule.dims["weight"]])
