"""From the tensors that a rank found in a script's checkpoint to the script's objects."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.distributed.script.saving.parts import OWN, from_bytes
from weft.distributed.script.saving.randomness import draw_random_for, write_random
from weft.distributed.script.saving.reading import RANDOM, Wanted, part_from
from weft.distributed.script.saving.stages import are_stages
from weft.distributed.script.saving.structure import put_together
from weft.distributed.script.saving.taking import find_weavings
from weft.distributed.script.saving.woven import consistency_of, cuts_of, is_at_servers, memory_name, mesh_of, slots_of
from weft.distributed.script.weaving.dtensors import as_dtensor
from weft.distributed.script.weaving.weaving import Weaving
from weft.distributed.script.world.world import World
from weft.errors import UsageError
from weft.training.checkpoint import CODEC, Ranks, Snapshot

__all__ = ["restore"]


def restore(find: Callable[[Wanted], Snapshot], parts: Mapping[str, Any], world: World, ranks: Ranks) -> dict[str, Any]:
    """Find a checkpoint and write it into the parts; the plain values in it. A collective call.

    Models are looked at first: where one does not fit, nothing is written.
    """
    number_of = find_weavings(parts, world.weavings) if ranks.mesh.num_replicas > 1 else {}
    weavings = {number: world.weavings[number] for number in sorted(set(number_of.values()))}
    consistencies = {number: consistency_of(weaving) for number, weaving in weavings.items()}
    owners = {name: weavings[number] for name, number in number_of.items()}
    cuts = {begin: cut for name, part in parts.items() for begin, cut in cuts_of(name, part, owners.get(name)).items()}
    meshes = {number: mesh_of(weaving) for number, weaving in weavings.items()}
    found = find(Wanted(parts.keys(), consistencies, number_of, cuts, meshes))
    known = found.progress["parts"]
    wanted = [name for name, facts in known.items() if name in parts or not facts["is_object"]]
    values = {name: part_from(known[name], found.entries, OWN) for name in wanted}
    for name, target in parts.items():
        values[name] = _lay_out(target, values[name], is_stage=are_stages(owners.get(name)))
        if isinstance(target, nn.Module):
            _check_fits(name, target, values[name])
    for weaving in weavings.values():
        weaving.leave_consensus()
    slots: dict[int, dict[str, dict[str, Tensor]]] = {}
    for name, target in parts.items():
        state = values.pop(name)
        if isinstance(target, torch.optim.Optimizer) and name in number_of:
            weaving = weavings[number_of[name]]
            if is_at_servers(weaving):
                slots.setdefault(number_of[name], {}).update(slots_of(target, state["state"], weaving))
                state = {**state, "state": {}}
        _write(name, target, state)
    for number, weaving in enumerate(world.weavings):
        _go_on(number, weaving, found, slots.get(number), is_woven=number in weavings)
    _write_random(found, ranks)
    return values


def _write(name: str, target: Any, state: Any) -> None:
    try:
        target.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError) as error:
        raise UsageError(f"part does not fit what was saved ({name}: {error}); it was saved of another") from error


def _lay_out(target: Any, state: Any, *, is_stage: bool) -> Any:
    """Parts of tensors as DTensors, where the target has such; of a stage, what it has of the whole model."""
    if isinstance(target, nn.Module):
        own = target.state_dict()
        if is_stage:
            state = {key: value for key, value in state.items() if key in own}
        return {key: as_dtensor(value, own[key]) if key in own else value for key, value in state.items()}
    if not isinstance(target, torch.optim.Optimizer) or not isinstance(state, dict):
        return state
    parameters = [parameter for group in target.param_groups for parameter in group["params"]]
    found = {
        number: {key: as_dtensor(v, parameters[number]) if isinstance(v, Tensor) else v for key, v in own.items()}
        for number, own in state.get("state", {}).items()
        if number < len(parameters)
    }
    return {**state, "state": found}


def _check_fits(name: str, model: nn.Module, state: Mapping[str, Any]) -> None:
    own = model.state_dict()
    for key in [*state, *own]:
        if key not in own or key not in state:
            has = "model" if key in own else "checkpoint"
            raise UsageError(f"checkpoint is of another model (only the {has} has {name}.{key}); build the one saved")
        shapes = [tuple(value.shape) if isinstance(value, Tensor) else () for value in (state[key], own[key])]
        if shapes[0] != shapes[1]:
            numbers = f"{name}.{key}, checkpoint: {shapes[0]}, model: {shapes[1]}"
            raise UsageError(f"checkpoint is of another model ({numbers}); build the one saved")


def _go_on(
    number: int, weaving: Weaving, found: Snapshot, slots: dict[str, dict[str, Tensor]] | None, *, is_woven: bool
) -> None:
    """Let a plan begin where it was, with what it remembers of the way."""
    saved = found.progress["weavings"]
    if number < len(saved):
        weaving.num_steps = saved[number]["num_steps"]
    if not is_woven:
        return
    begin = memory_name(number)
    memory = {name.removeprefix(begin): entry for name, entry in found.entries.items() if name.startswith(begin)}
    if is_at_servers(weaving):
        weaving.restore(slots, {name: entry for name, entry in memory.items() if name.startswith(CODEC)})
        return
    assert weaving.replicas is not None, "there are several ranks"
    weaving.replicas.remember(weaving.num_steps, memory)
    weaving.forget_loading()  # what was loaded is each rank's own


def _write_random(found: Snapshot, ranks: Ranks) -> None:
    """A rank's own stream where they are as many as saved; else rank 0 takes rank 0's, and the others begin by it."""
    taken = from_bytes(found.entries[RANDOM].tensor)
    state = put_together(taken.structure, taken.tensors.__getitem__)
    if ranks.mesh.rank == 0 or found.progress["ranks"] == ranks.mesh.num_replicas:
        write_random(state)
    else:
        draw_random_for(ranks.mesh.rank, state)
