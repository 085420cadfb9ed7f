"""Between the state of a training and a checkpoint's named tensors.

parameter/<name>   buffer/<name>   random   optimizer/lr   optimizer/step   slot/<parameter>/<slot>

and what the replicas carry themselves, by names of their own.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.errors import CorruptFileError
from weft.graph import State
from weft.graph.executors.random_state import fit_random_state
from weft.training.checkpoint import CODEC, Cut, Entry, Kind, Ranks, Snapshot
from weft.training.loop import TrainingState
from weft.training.optimizers import OptimizerState, Shared, slots_beside
from weft.training.replicas import AbstractReplicas, SoloReplicas
from weft.training.sampling import SamplerState

__all__ = ["cut_beside", "ranks_of", "readers_of", "restore", "take_snapshot"]


def ranks_of(replicas: AbstractReplicas) -> Ranks:
    """The replicas as a checkpoint sees them."""
    cut_of = replicas.placement.cut_of
    return Ranks(replicas.mesh, replicas.gather, lambda name: cut_beside(name, cut_of), replicas.consistency)


def cut_beside(name: str, cut_of: Callable[[str], Cut | None]) -> Cut | None:
    """Of an entry that is the model's, or one that replicas keep beside a parameter: `elastic/centre/<parameter>` is
    cut as the parameter is, and `codec/residual/<parameter>` as its gradient; factors of it are whole."""
    kind, _, rest = name.partition("/")
    if name.startswith(CODEC):
        use, _, parameter = rest.partition("/")
        return None if use == "factor" or not parameter else cut_of(f"gradient/{parameter}")
    if kind in ("parameter", "slot", "buffer") or "/" not in rest:
        return cut_of(name)
    return cut_of(f"parameter/{rest.partition('/')[2]}")


def readers_of(replicas: AbstractReplicas, model: State) -> Ranks:
    """The replicas as they read a checkpoint, each what the model on it has a place for. A collective call, in which
    ranks that hold parts of a model tell each other of which tensors."""
    ranks = ranks_of(replicas)
    if ranks.mesh.num_ranks == ranks.mesh.data * ranks.mesh.shard:
        return ranks  # each holds a part of every tensor
    own = [f"{kind}/{name}" for kind, tensors in _tensors_of(model) for name in tensors]
    known = {name for names in ranks.gather_json(own) for name in names}
    return replace(ranks, elsewhere=frozenset(known.difference(own)))


def take_snapshot(state: TrainingState, extra: Mapping[str, Any], replicas: AbstractReplicas | None = None) -> Snapshot:
    """The state of this rank as a checkpoint holds it; `extra` is progress that the caller wants back."""
    replicas = replicas or SoloReplicas()
    optimizer, cut_of = replicas.collect(state.optimizer), replicas.placement.cut_of
    trained = {f"parameter/{name}": tensor for name, tensor in state.model.parameters.items()}
    for name, slots in optimizer.slots.items():
        trained |= {f"slot/{name}/{slot}": tensor for slot, tensor in slots.items()}
    # Ranks that go their own ways have trained different tensors; others may hold parts of one.
    kind: Kind = "global" if replicas.has_one_model else "mean"
    entries = {name: Entry.of_part(tensor, kind, cut_of(name)) for name, tensor in trained.items()}
    entries["optimizer/lr"] = Entry(optimizer.shared.lr)
    entries["optimizer/step"] = Entry(optimizer.shared.step)
    # Running statistics are each rank's own between evaluations, and a resumed run must find them so.
    kind = "global" if replicas.mesh.num_replicas == 1 else "mean"
    for name, tensor in state.model.buffers.items():
        entries[f"buffer/{name}"] = Entry.of_part(tensor, kind, cut_of(f"buffer/{name}"))
    entries["random"] = Entry(state.model.random, "own")
    entries |= replicas.memory()
    progress = {
        "samples": state.samples,
        "evaluated": state.evaluated,
        "target_met": state.target_met,
        "sampler": state.sampler.to_dict(),
        "consistency": replicas.consistency,
        **extra,
    }
    return Snapshot(state.step, entries, progress)


def restore(state: TrainingState, snapshot: Snapshot) -> TrainingState:
    """Write what a rank found in a checkpoint into a freshly built state, whose tensors the executor and the optimizer
    already know, wherever they are.

    A rank that the checkpoint does not know keeps its fresh randomness.
    """
    tensors = {name: entry.tensor for name, entry in snapshot.entries.items()}
    if "random" in snapshot.unfit:
        tensors["random"] = state.model.random
    elif "random" in tensors:
        tensors["random"] = fit_random_state(tensors["random"], state.model.random)
    _check_no_stranger(snapshot, state)
    with torch.no_grad():
        for kind, own in _tensors_of(state.model):
            for name, tensor in own.items():
                tensor.copy_(_find(tensors, f"{kind}/{name}", tensor.shape))
    parameters = state.model.parameters
    # A slot that the checkpoint lacks begins as in a new training: ranks that kept the momentum themselves have none.
    slots = {name: dict(own) for name, own in state.optimizer.slots.items()}
    for key in tensors:
        if key.startswith("slot/"):
            name, _, slot = key.removeprefix("slot/").rpartition("/")
            if name not in slots and name in parameters:  # another rank's to update
                continue
            slots.setdefault(name, {})[slot] = _find(tensors, key)
    fresh, progress = state.optimizer.shared, snapshot.progress
    shared = Shared(
        lr=_find(tensors, "optimizer/lr").to(fresh.lr.device),
        step=_find(tensors, "optimizer/step").to(fresh.step.device),
    )
    return TrainingState(
        model=replace(state.model, random=_find(tensors, "random")),
        optimizer=OptimizerState(shared, {name: slots_beside(parameters[name], own) for name, own in slots.items()}),
        sampler=SamplerState.from_dict(progress["sampler"]),
        step=snapshot.step,
        samples=progress["samples"],
        evaluated=progress["evaluated"],
        target_met=progress["target_met"],
    )


def _tensors_of(model: State) -> tuple[tuple[str, Mapping[str, Tensor]], ...]:
    return ("parameter", model.parameters), ("buffer", model.buffers)


def _check_no_stranger(snapshot: Snapshot, state: TrainingState) -> None:
    """A tensor that the model has no place for was not meant for this model, whatever else fits."""
    known = {f"{kind}/{name}" for kind, own in _tensors_of(state.model) for name in own}
    strangers = sorted(n for n in snapshot.entries if n.startswith(("parameter/", "buffer/")) and n not in known)
    if strangers:
        raise CorruptFileError(f"checkpoint has an entry that the model lacks ({strangers[0]}); it is of another model")


def _find(tensors: Mapping[str, Tensor], key: str, shape: torch.Size | None = None) -> Tensor:
    tensor = tensors.get(key)
    if tensor is None:
        raise CorruptFileError(f"checkpoint lacks an entry ({key}); it is of another model or optimizer")
    if shape is not None and tensor.shape != shape:
        numbers = f"{key}: {tuple(tensor.shape)}, model: {tuple(shape)}"
        raise CorruptFileError(f"checkpoint entry has another shape ({numbers}); it is of another model")
    return tensor
