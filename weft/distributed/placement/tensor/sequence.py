"""Sequence parallelism (Korthikanti et al., 2022): between split layers every rank has a part of each sequence.

    rule {"blocks": "sequence"}

    x [b, l, w] --own part--> [b, l/n, w] norm, dropout, sum ---> all-gather --[column ... row]-- reduce-scatter --> ...
                                                                                                 own part
    in the end the parts are gathered

As many bytes travel as by all-reduces, and activations between layers take an n-th of the memory. The gradients of what
is whole there (norms, biases after rows) are of a rank's own positions, and are added up over the ranks as well.
"""

from typing import Any

from torch import Tensor, nn

from weft.distributed.placement.forwards import replace_forward
from weft.distributed.placement.rules import Rules
from weft.distributed.placement.tensor.collectives import gather, scatter
from weft.distributed.placement.tensor.region import Region
from weft.distributed.placement.tensor.rules import find_block
from weft.errors import PlanError

__all__ = ["split_sequences"]

BY_POSITION = (nn.LayerNorm, nn.RMSNorm, nn.Linear, nn.Embedding)
"""Layers that compute each position of [batch, length, width] by itself; Conv1D of Hugging Face and its norms too."""
ALSO = ("Conv1D", "T5LayerNorm")


def split_sequences(model: nn.Module, region: Region, rules: Rules) -> frozenset[str]:
    """Let the modules that rules name take parts of sequences; the parameters in them.

    Raises:
        PlanError: a layer in one of them looks at several positions, and it is not known how to give it all of them.
    """
    named = {name: module for name, module in model.named_modules() if rules.word_of(name) == "sequence"}
    rules.check_names("sequence", [name for name, module in model.named_modules() if name and any(module.children())])
    tops = {name: module for name, module in named.items() if not any(name.startswith(f"{up}.") for up in named)}
    inside: set[str] = set()
    for name, module in tops.items():
        _check(name, module)
        inside |= {f"{name}.{own}" for own, _ in module.named_parameters()}
        replace_forward(module, _forward_of(region))
    held = {id(tensor): name for name, tensor in model.named_parameters(remove_duplicate=False) if name not in inside}
    tied = next((name for name in sorted(inside) if id(model.get_parameter(name)) in held), None)
    if tied is not None:
        raise PlanError(f"weight is used outside of parts of sequences too ({tied}); leave its layer out of the rule")
    return frozenset(inside)


def _forward_of(region: Region) -> Any:
    def forward(module: nn.Module, x: Tensor, *arguments: Any, **options: Any) -> Any:
        length = x.shape[1]
        region.enter_sequence(length)
        try:
            found = type(module).forward(module, scatter(x, region.group, 1), *arguments, **options)
        finally:
            region.leave_sequence()
        if isinstance(found, Tensor):
            return gather(found, region.group, 1, length)
        return (gather(found[0], region.group, 1, length), *found[1:])

    return forward


def _check(name: str, module: nn.Module) -> None:
    known: list[str] = []
    for below, layer in module.named_modules():
        block, path = find_block(layer), f"{name}.{below}".rstrip(".")
        if block is not None and block.heads and not block.takes_any_length:
            raise PlanError(
                f"attention takes its shapes from its input, of which there would be a part ({path}: "
                f"{type(layer).__name__}); leave the rule out"
            )
        if block is not None and block.heads:
            known.append(f"{path}.")
        has_own = bool(layer._parameters) and not path.startswith(tuple(known) or "\0")
        if has_own and not isinstance(layer, BY_POSITION) and type(layer).__name__ not in ALSO:
            raise PlanError(
                f"layer may look at several positions, of which a rank would have a part ({path}: "
                f"{type(layer).__name__}); leave it out of the rule"
            )
