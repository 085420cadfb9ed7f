"""Models and optimizers that ranks train together, on their way into a checkpoint and out of it.

    plan                        a parameter                            state of the optimizer
    synchronous                 once                                   once
    shard                       once                                   in pieces, each by the rank that has it
    local, elastic, gossip      once what all stand for, and of        of every rank; others take the mean
                                every rank its own
    servers, pairs              once what all stand for                once, from where it is kept

Running statistics that differ are of every rank, and others take the mean. What else a plan remembers goes by its own
names (`replicas.memory()`), behind `weft/weaving/0/`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.distributed.placement.torch_steps import find_steps
from weft.distributed.script.saving.parts import OWN, Brought, bring_alike, bring_own, entry_of, state_of
from weft.distributed.script.saving.structure import take_apart
from weft.distributed.script.weaving.cuts import cut_of_state, cut_of_tensor, entries_of
from weft.distributed.script.weaving.weaving import Weaving
from weft.specs import Mesh
from weft.training.checkpoint import Cut, Entry, Kind, Ranks

__all__ = [
    "bring_memory",
    "bring_model",
    "bring_optimizer",
    "buffers_of",
    "consistency_of",
    "cuts_of",
    "cuts_of_model",
    "cuts_of_optimizer",
    "facts_of",
    "find_cut",
    "is_at_servers",
    "memory_name",
    "mesh_of",
    "slots_of",
]


def consistency_of(weaving: Weaving) -> str | None:
    """How ranks come together that have each their own weights, with which they go on; None where all have the same."""
    return weaving.replicas.consistency if weaving.replicas is not None else None


def facts_of(weaving: Weaving) -> dict[str, Any]:
    return {"consistency": consistency_of(weaving), "num_steps": weaving.num_steps}


def is_at_servers(weaving: Weaving) -> bool:
    """Whether servers hold the weights, and with them the state of the optimizer."""
    return weaving.plan.num_shards > 0


# Models.


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """All in its state beside parameters, by name there: running statistics."""
    parameters = {id(parameter) for parameter in model.parameters()}
    state = model.state_dict(keep_vars=True)
    return {key: value for key, value in state.items() if isinstance(value, Tensor) and id(value) not in parameters}


def bring_model(name: str, model: nn.Module, weaving: Weaving, alike: set[str]) -> Brought:
    """A model, while it holds the consensus.

    Args:
        alike: buffers that all ranks have alike.
    """
    taken, buffers, cuts = take_apart(name, state_of(model)), buffers_of(model), cuts_of_model(name, model, weaving)
    entries = {}
    for key, tensor in taken.tensors.items():
        buffer = key.removeprefix(f"{name}/")
        kind: Kind = "mean" if buffer in buffers and buffer not in alike else "global"
        entries[key] = entry_of(tensor, kind, cuts.get(key), mesh_of(weaving).replica)
    if consistency_of(weaving) is not None:
        entries |= {f"{OWN}{name}/{key}": Entry(own, "own") for key, own in _own_weights(model, weaving).items()}
    return Brought({"is_object": True, "structure": taken.structure}, entries)


def _own_weights(model: nn.Module, weaving: Weaving) -> dict[str, Tensor]:
    """This rank's weights, by name in the state of the model."""
    own, names = weaving.own_weights(), {id(parameter): name for name, parameter in weaving.parameters.items()}
    state = model.state_dict(keep_vars=True)
    return {key: own[names[id(value)]] for key, value in state.items() if names.get(id(value)) in own}


def bring_memory(number: int, weaving: Weaving) -> dict[str, Entry]:
    """The memory of the plan. Weights that servers hold in full are what all stand for, and in the model."""
    assert weaving.replicas is not None, "there are several ranks"
    memory = weaving.replicas.memory()
    replica = weaving.replicas.mesh.replica
    return {
        memory_name(number, key): replace(entry, replica=replica)
        for key, entry in memory.items()
        if not key.startswith("parameter/")
    }


def memory_name(number: int, key: str = "") -> str:
    return f"weft/weaving/{number}/{key}"


# Optimizers.


def bring_optimizer(name: str, optimizer: torch.optim.Optimizer, weaving: Weaving, ranks: Ranks) -> Brought:
    """An optimizer, wherever its state is. A collective call."""
    if is_at_servers(weaving):
        return _bring_from_servers(name, optimizer, weaving, ranks.mesh.rank)
    if find_steps(optimizer) is not None:
        return _bring_pieces(name, optimizer, ranks)
    taken, cuts = take_apart(name, optimizer.state_dict()), cuts_of_optimizer(name, optimizer, weaving)
    if cuts and consistency_of(weaving) is None:
        entries = {key: entry_of(tensor, "global", find_cut(cuts, key)) for key, tensor in taken.tensors.items()}
        return Brought({"is_object": True, "structure": taken.structure}, entries)
    if consistency_of(weaving) is None:
        return bring_alike(taken, is_object=True, is_mine=weaving.plan.is_synchronous or ranks.mesh.rank == 0)
    shapes = {key: [str(tensor.dtype), list(tensor.shape)] for key, tensor in taken.tensors.items()}
    if any(other != shapes for other in ranks.gather_json(shapes)):  # a parameter has had no gradient on one of them
        return bring_own(name, taken, is_object=True)
    entries = {key: Entry(tensor, "mean") for key, tensor in taken.tensors.items()}
    return Brought({"is_object": True, "is_optimizer": True, "structure": taken.structure}, entries)


def _bring_from_servers(name: str, optimizer: torch.optim.Optimizer, weaving: Weaving, rank: int) -> Brought:
    slots = weaving.collect_slots()
    names = {id(parameter): key for key, parameter in weaving.parameters.items()}
    found = {number: slots.get(names.get(id(p), ""), {}) for number, p in enumerate(_parameters_of(optimizer))}
    state = {number: dict(own) for number, own in found.items() if own}
    taken = take_apart(name, {"state": state, "param_groups": _groups_of(optimizer)})
    return bring_alike(taken, is_object=True, is_mine=rank == 0)


def _bring_pieces(name: str, optimizer: torch.optim.Optimizer, ranks: Ranks) -> Brought:
    """Of every parameter this rank's piece; the structure is that of the whole, so that anybody can read it."""
    steps = find_steps(optimizer)
    assert steps is not None
    structures: dict[str, Any] = {}
    entries: dict[str, Entry] = {}
    for number, parameter in enumerate(_parameters_of(optimizer)):
        taken = take_apart(f"{name}/state/{number}", dict(steps.state_of(optimizer, parameter)))
        cut = steps.cut_of(parameter)
        entries |= {key: entry_of(tensor, "global", cut) for key, tensor in taken.tensors.items()}
        if taken.structure:
            structures[str(number)] = taken.structure
    everyone = {int(number): found for said in ranks.gather_json(structures) for number, found in said.items()}
    groups = take_apart(f"{name}/param_groups", _groups_of(optimizer))
    entries |= {key: Entry(tensor) for key, tensor in groups.tensors.items()}
    state = {"$items": [[number, everyone[number]] for number in sorted(everyone)]}
    return Brought({"is_object": True, "structure": {"state": state, "param_groups": groups.structure}}, entries)


# Cuts.


def cuts_of(name: str, part: Any, weaving: Weaving | None) -> dict[str, Cut]:
    """The parts that this rank holds of the tensors of a model or optimizer, by their names, or by what they begin with
    and a slash."""
    if isinstance(part, nn.Module):
        return cuts_of_model(name, part, weaving)
    return cuts_of_optimizer(name, part, weaving) if isinstance(part, torch.optim.Optimizer) else {}


def cuts_of_model(name: str, model: nn.Module, weaving: Weaving | None) -> dict[str, Cut]:
    entries, state = entries_of(weaving), model.state_dict(keep_vars=True)
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    cuts = {f"{name}/{key}": cut_of_tensor(tensor, weaving, entries) for key, tensor in tensors.items()}
    return {key: cut for key, cut in cuts.items() if cut is not None}


def cuts_of_optimizer(name: str, optimizer: torch.optim.Optimizer, weaving: Weaving | None) -> dict[str, Cut]:
    """Of state that has the shape of its parameter."""
    steps, entries = find_steps(optimizer), entries_of(weaving)
    cuts = {
        f"{name}/state/{number}/": steps.cut_of(p) if steps is not None else cut_of_state(p, weaving, entries)
        for number, p in enumerate(_parameters_of(optimizer))
    }
    return {begin: cut for begin, cut in cuts.items() if cut is not None}


def find_cut(cuts: Mapping[str, Cut], name: str) -> Cut | None:
    """That of a tensor, by its name or by what that begins with."""
    begun = (cut for begin, cut in cuts.items() if begin.endswith("/") and name.startswith(begin))
    return cuts.get(name) or next(begun, None)


def mesh_of(weaving: Weaving) -> Mesh:
    return weaving.replicas.mesh if weaving.replicas is not None else Mesh()


def slots_of(
    optimizer: torch.optim.Optimizer, state: Mapping[int, Any], weaving: Weaving
) -> dict[str, dict[str, Tensor]]:
    """The state of a whole optimizer by names of parameters, as servers want it."""
    names = {id(parameter): key for key, parameter in weaving.parameters.items()}
    parameters = dict(enumerate(_parameters_of(optimizer)))
    return {names[id(parameters[number])]: dict(own) for number, own in state.items()}


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """By the numbers that they have in its state_dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """As its state_dict has them."""
    groups, first = [], 0
    for group in optimizer.param_groups:
        last = first + len(group["params"])
        groups.append({**{key: v for key, v in group.items() if key != "params"}, "params": list(range(first, last))})
        first = last
    return groups
