"""The axis `linear`: ranks that are data parallel, except in the linear layers at the end, which they have split.

linear=2        rank 0   samples a b   conv, whole     \\               /   half of fc1, fc2, fc3
                rank 1   samples c d   conv, whole      > a b c d ----<    the other half
gradients       conv: added up along `linear` as along `data`; fc: of all samples already, along `data` alone

On stages of a pipeline those split layers that have some of the tail, or of the layers that rules name; the others are
data parallel along `linear`, and nothing else.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import final

import torch
from torch import Tensor, nn

from weft.distributed.group.group import AbstractGroup
from weft.distributed.placement.chunks import chunks_of
from weft.distributed.placement.forwards import replace_forward
from weft.distributed.placement.linear.layers import Chain, PartDropout, SplitLinear
from weft.distributed.placement.linear.tail import Link, find_links, is_linear, tail_of
from weft.distributed.placement.linear.ways import choose_ways
from weft.distributed.placement.mesh import MeshGroups
from weft.distributed.placement.rules import NO_RULES, Rules
from weft.distributed.placement.torch_steps import check_cuttable
from weft.distributed.placement.weighting import weigh_loss
from weft.distributed.placement.whole import gather_whole
from weft.errors import PlanError
from weft.graph import AbstractExecutor, EagerExecutor, Loss
from weft.specs import Axis, Plan
from weft.training.checkpoint import Cut, compose, fused_cut
from weft.training.optimizers import AbstractOptimizer, OptimizerState
from weft.training.placement import AbstractPlacement, MakeExecutor
from weft.training.sampling import span
from weft.training.weighting import Weighting

__all__ = ["WORDS", "SplitLinearLayers", "make_linear"]

WORDS = frozenset({"data", "split"})
"""Of rules: a linear layer is whole on every rank, or split."""


def make_linear(
    groups: MeshGroups, plan: Plan, inner: AbstractPlacement, *, rules: Rules = NO_RULES
) -> AbstractPlacement:
    """The placement of a rank. A collective call.

    Args:
        inner: that of the axes that were cut before.
        rules: which layers are split, by hand.
    """
    return SplitLinearLayers(groups.apart("linear"), groups.holders, inner, rules)


@final
class SplitLinearLayers(AbstractPlacement):
    """The linear tail of a model in parts, or the layers that rules say.

    Args:
        group: the ranks that have the layers together.
        holders: ranks that together hold every part of the model.
    """

    def __init__(
        self, group: AbstractGroup, holders: AbstractGroup, inner: AbstractPlacement, rules: Rules = NO_RULES
    ) -> None:
        self._group = group
        self._holders = holders
        self._inner = inner
        self._rules = rules
        self._weighting = Weighting()
        self._cuts: dict[str, Cut] = {}  # by parameter
        self._parts: dict[str, Tensor] = {}  # the parameters themselves
        self._chains: list[Chain] = []

    def look_at(self, inputs: tuple[Tensor, ...]) -> None:
        self._inner.look_at(inputs)

    def place(self, module: nn.Module) -> nn.Module:
        """Every rank looks at the whole model: the end of a stage is not the model's, and all find the same."""
        links = find_links(module)
        chains = _chains_of(links, _choose(module, links, self._rules))
        module = self._inner.place(module)
        for chain in _held_chains(module, chains):
            self._split(module, chain)
        return module

    def _split(self, module: nn.Module, links: list[Link]) -> None:
        """One chain of layers, each in the cheapest way."""
        layers = [module.get_submodule(link.name) for link in links]
        sizes = [(layer.in_features, layer.out_features) for layer in layers if isinstance(layer, nn.Linear)]
        joints = [link.joint is not None for link in links[1:]]
        chain = Chain(self._group, self.weighting)
        self._chains.append(chain)
        ways = choose_ways(sizes, joints, self._group.size)
        for i, (link, layer, size, way) in enumerate(zip(links, layers, sizes, ways, strict=True)):
            split = SplitLinear(chain, way, *size, is_first=i == 0)
            for key, parameter in layer.named_parameters(recurse=False):
                if key in split.dims:
                    self._cut(f"{link.name}.{key}", parameter, split.dims[key])
            replace_forward(layer, split.forward)
            for name in link.joint.dropouts if way.before == "part" and link.joint is not None else ():
                replace_forward(module.get_submodule(name), PartDropout(chain, size[0]).forward)

    def _cut(self, name: str, parameter: Tensor, dim: int) -> None:
        place = span(parameter.shape[dim], self._group.rank, self._group.size)
        cut = fused_cut(tuple(parameter.shape), dim, [(place.start, place.stop)])
        parameter.data = cut.take(parameter.detach())
        self._cuts[name], self._parts[name] = cut, parameter

    @contextmanager
    def use_whole(self) -> Iterator[None]:
        with self._inner.use_whole():
            parts = {name: parameter.data for name, parameter in self._parts.items()}
            entries = {f"parameter/{name}": part for name, part in parts.items()}
            whole = gather_whole(self._group, lambda entry: self._cuts[entry.removeprefix("parameter/")], entries)
            self._hold({name: whole[f"parameter/{name}"].to(part) for name, part in parts.items()}, is_whole=True)
            try:
                yield
            finally:
                self._hold(parts, is_whole=False)

    def _hold(self, values: Mapping[str, Tensor], *, is_whole: bool) -> None:
        for name, value in values.items():
            self._parts[name].data = value
        for chain in self._chains:
            chain.is_whole = is_whole

    def execute(self, module: nn.Module, loss: Loss, make: MakeExecutor) -> AbstractExecutor:
        is_weighed = self._inner.weighting is not None
        make_eager = partial(_make_eager, make)
        return self._inner.execute(module, loss if is_weighed else weigh_loss(loss, self._weighting), make_eager)

    @property
    def has_loss(self) -> bool:
        return self._inner.has_loss

    def reduced_over(self, name: str) -> tuple[Axis, ...]:
        axes = self._inner.reduced_over(name)
        return tuple(axis for axis in axes if axis != "linear") if name in self._cuts else axes

    @property
    def weighting(self) -> Weighting:
        return self._inner.weighting or self._weighting

    @property
    def activation_bytes(self) -> int:
        return self._inner.activation_bytes

    def owned(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self._inner.owned(parameters)

    def prepare(
        self, optimizer: AbstractOptimizer, parameters: Mapping[str, Tensor], state: OptimizerState
    ) -> Mapping[str, Tensor]:
        return self._inner.prepare(optimizer, parameters, state)

    def take_over(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> None:
        check_cuttable(optimizer)
        self._inner.take_over(optimizer, parameters)

    def spread(self, tensors: Mapping[str, Tensor]) -> int:
        return self._inner.spread(tensors)

    def cut_of(self, name: str) -> Cut | None:
        kind, _, rest = name.partition("/")
        owner = rest.rpartition("/")[0] if kind == "slot" else rest
        return compose(self._inner.cut_of(name), self._cuts.get(owner))

    def whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return gather_whole(self._holders, self.cut_of, tensors)

    def norm(self, norms: Mapping[str, Tensor]) -> Tensor:
        """Norms of parts become those of whole tensors; what these make together is for the inner placement to say."""
        return self._inner.norm(self._join(norms))

    def whole_norms(self, norms: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self._inner.whole_norms(self._join(norms))

    def _join(self, norms: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        parts = [name for name in norms if name in self._cuts]
        if not parts:
            return norms
        squares = torch.stack([norms[name].detach().cpu().double().square() for name in parts])
        self._group.all_reduce(squares)
        whole = {name: root.to(norms[name]) for name, root in zip(parts, squares.sqrt(), strict=True)}
        return {name: whole.get(name, norm) for name, norm in norms.items()}


def _make_eager(make: MakeExecutor, module: nn.Module, loss: Loss) -> AbstractExecutor:
    executor = make(module, loss)
    if not isinstance(executor, EagerExecutor):
        raise PlanError(
            f"ranks meet inside of split layers, which this executor cannot capture "
            f"({type(executor).__name__}); use executor=eager"
        )
    return executor


def _held_chains(module: nn.Module, chains: list[list[Link]]) -> Iterator[list[Link]]:
    """Of all chains of a model the runs of layers that this rank has. Between stages, and between chunks of one, every
    rank has the activations of its own samples."""
    homes = {
        name: number
        for number, chunk in enumerate(chunks_of(module))
        for name, layer in chunk.named_modules()
        if is_linear(layer)
    }
    for chain in chains:
        for home, links in groupby(chain, key=lambda link: homes.get(link.name)):
            if home is not None:
                yield list(links)


def _choose(module: nn.Module, links: list[Link], rules: Rules) -> set[str]:
    """The layers that are split: those of the tail, unless a rule says otherwise."""
    layers = {name: layer for name, layer in module.named_modules() if is_linear(layer)}
    tied = _tied(module)
    free = [name for name, layer in layers.items() if not any(id(p) in tied for p in layer.parameters())]
    rules.check_names("split", free)
    words = {name: rules.word_of(name) for name in layers}
    tail = set(tail_of(links))
    chosen = {name for name in free if words[name] == "split" or (words[name] is None and name in tail)}
    if not chosen:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in module.modules() if not any(layer.children())}))
        raise PlanError(
            f"model does not end in linear layers that could be split (layers: {kinds}); "
            "name some by a rule (--set 'rules.NAME=split'), or use data=N"
        )
    return chosen


def _tied(module: nn.Module) -> set[int]:
    """Parameters that several layers have."""
    seen: dict[int, int] = {}
    for layer in module.modules():
        for parameter in layer.parameters(recurse=False):
            seen[id(parameter)] = seen.get(id(parameter), 0) + 1
    return {key for key, count in seen.items() if count > 1}


def _chains_of(links: list[Link], chosen: set[str]) -> list[list[Link]]:
    """Chosen layers that follow each other. A layer that is followed by several, or called several times, is alone."""
    links = [*links, *(Link(name) for name in sorted(chosen - {link.name for link in links}))]
    followers: dict[str, int] = {}
    for link in links:
        if link.follows is not None:
            followers[link.follows] = followers.get(link.follows, 0) + 1
    chains: dict[str, list[Link]] = {}
    for link in links:
        if link.name not in chosen:
            continue
        before = link.follows
        joins = before in chains and followers[before] == 1 and chains[before][-1].name == before
        if before is not None and joins:
            chains[link.name] = chains.pop(before)
            chains[link.name].append(link)
        else:
            chains[link.name] = [link]
    return list(chains.values())
