"""Woven tensors of which a rank holds parts: which parts, and whole states that a script loads into them.

    model.load_state_dict(torch.load("model.pt"))        of the whole model; on every rank its part is taken

A placement of Weft's knows the parts, or PyTorch does, where they are DTensors.
"""

from typing import Any

from torch import Tensor, nn

from weft.distributed.script.weaving.dtensors import as_dtensor, cut_of_dtensor, is_dtensor
from weft.distributed.script.weaving.own_hooks import OwnHook
from weft.distributed.script.weaving.weaving import Weaving
from weft.training.checkpoint import Cut

__all__ = ["cut_of_state", "cut_of_tensor", "cut_whole_states", "entries_of"]


def entries_of(weaving: Weaving | None) -> dict[int, str]:
    """The names of parameters and buffers, by identity, as a placement knows them; none in one process."""
    if weaving is None or weaving.replicas is None:
        return {}
    return {
        **{id(parameter): f"parameter/{name}" for name, parameter in weaving.parameters.items()},
        **{id(buffer): f"buffer/{name}" for name, buffer in weaving.buffers.items()},
    }


def cut_of_tensor(tensor: Tensor, weaving: Weaving | None, entries: dict[int, str]) -> Cut | None:
    """The part that a tensor of a model is; None for all of it.

    Args:
        entries: as `entries_of` gives them.
    """
    if is_dtensor(tensor):
        return cut_of_dtensor(tensor)
    if weaving is None or weaving.replicas is None or id(tensor) not in entries:
        return None
    return weaving.replicas.placement.cut_of(entries[id(tensor)])


def cut_of_state(parameter: Tensor, weaving: Weaving | None, entries: dict[int, str]) -> Cut | None:
    """The part that an optimizer's state of a parameter is, where it has the parameter's shape."""
    if is_dtensor(parameter):
        return cut_of_dtensor(parameter)
    entry = entries.get(id(parameter))
    if entry is None or weaving is None or weaving.replicas is None:
        return None
    return weaving.replicas.placement.cut_of(f"slot/{entry.removeprefix('parameter/')}/")


def cut_whole_states(weaving: Weaving) -> None:
    """Let every module that holds parts of tensors take them from whole ones, when a script loads a state."""
    entries = entries_of(weaving)
    for model in weaving.models:
        for module in model.modules():
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if any(cut_of_tensor(tensor, weaving, entries) for tensor in own):
                _attach(module, weaving)


def _attach(module: nn.Module, weaving: Weaving) -> None:
    def take(own: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        entries = entries_of(weaving)
        for name, tensor in {**own._parameters, **own._buffers}.items():
            whole = state.get(f"{prefix}{name}")
            if tensor is None or not isinstance(whole, Tensor) or is_dtensor(whole):
                continue
            cut = cut_of_tensor(tensor, weaving, entries)
            if cut is not None and tuple(whole.shape) == cut.shape:
                state[f"{prefix}{name}"] = as_dtensor(cut.take(whole), tensor)

    handle = module.register_load_state_dict_pre_hook(OwnHook(take))
    weaving.attached.append((module._load_state_dict_pre_hooks, handle.id))
