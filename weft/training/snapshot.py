"""Between the state of a training and a checkpoint's named tensors.

parameter/<name>   buffer/<name>   random   optimizer/lr   optimizer/step   slot/<parameter>/<slot>

and what the replicas carry themselves, by names of their own.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.errors import CorruptFileError
from weft.graph import State
from weft.graph.executors.random_state import fit_random_state
from weft.training.checkpoint import Entry, Snapshot
from weft.training.layout import AVERAGED, PER_RANK, REPLICATED, mean_of
from weft.training.loop import TrainingState
from weft.training.optimizers import OptimizerState, Shared, slots_beside
from weft.training.replicas import AbstractReplicas, SoloReplicas
from weft.training.sampling import SamplerState

__all__ = ["fit_to_replicas", "restore", "take_snapshot"]


def take_snapshot(state: TrainingState, extra: Mapping[str, Any], replicas: AbstractReplicas | None = None) -> Snapshot:
    """The state of all ranks as a checkpoint holds it; `extra` is progress that the caller wants back."""
    replicas = replicas or SoloReplicas()
    optimizer = replicas.collect(state.optimizer)
    trained = {f"parameter/{name}": tensor for name, tensor in state.model.parameters.items()}
    for name, slots in optimizer.slots.items():
        # Sorted, for they are gathered one by one: an update may have put them in another order on some rank.
        trained |= {f"slot/{name}/{slot}": slots[slot] for slot in sorted(slots)}
    entries = {name: _entry(tensor, replicas) for name, tensor in trained.items()}
    entries["optimizer/lr"] = Entry(REPLICATED, (optimizer.shared.lr,))
    entries["optimizer/step"] = Entry(REPLICATED, (optimizer.shared.step,))
    # Running statistics are each rank's own between evaluations, and a resumed run must find them so.
    layout = REPLICATED if replicas.mesh.num_replicas == 1 else PER_RANK
    for name, tensor in state.model.buffers.items():
        entries[f"buffer/{name}"] = Entry(layout, replicas.gather(tensor))
    entries["random"] = Entry(PER_RANK, replicas.gather(state.model.random))
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


def fit_to_replicas(snapshot: Snapshot, replicas: AbstractReplicas) -> Snapshot:
    """The checkpoint as these replicas go on from it.

    Weights and slots of a rank's own are for ranks that come together as those did who saved them. With another
    consistency all begin with the mean: synchronous ranks that began apart would stay apart.
    """
    own = replicas.consistency
    # Checkpoints that do not say were written before it was kept; relaxed ranks have always gone on from their own.
    if own is not None and snapshot.progress.get("consistency", own) == own:
        return snapshot
    entries = {name: _agreed(entry) for name, entry in snapshot.entries.items() if not _is_of_scheme(name, entry)}
    return replace(snapshot, entries=entries)


def restore(state: TrainingState, snapshot: Snapshot, rank: int = 0, size: int = 1) -> TrainingState:
    """Write a checkpoint into a freshly built state, whose tensors the executor and the optimizer already know.

    The number of ranks may differ from that of the checkpoint: a rank that it does not know keeps its fresh randomness
    and takes the running statistics of rank 0.
    """
    tensors = {name: _of_rank(name, entry, rank, size) for name, entry in snapshot.entries.items()}
    if "random" in tensors:
        random, fresh = tensors["random"], state.model.random
        tensors["random"] = fresh if random is None else fit_random_state(random, fresh)
    _check_no_stranger(snapshot, state)
    with torch.no_grad():
        for kind, own in _tensors_of(state.model):
            for name, tensor in own.items():
                tensor.copy_(_find(tensors, f"{kind}/{name}", tensor.shape))
    parameters = state.model.parameters
    slots: dict[str, dict[str, Tensor]] = {name: {} for name in state.optimizer.slots}
    for key in tensors:
        if key.startswith("slot/"):
            name, _, slot = key.removeprefix("slot/").rpartition("/")
            slots.setdefault(name, {})[slot] = _find(tensors, key)
    shared = Shared(lr=_find(tensors, "optimizer/lr"), step=_find(tensors, "optimizer/step"))
    progress = snapshot.progress
    return TrainingState(
        model=replace(state.model, random=_find(tensors, "random")),
        optimizer=OptimizerState(shared, {name: slots_beside(parameters[name], own) for name, own in slots.items()}),
        sampler=SamplerState.from_dict(progress["sampler"]),
        step=snapshot.step,
        samples=progress["samples"],
        evaluated=progress["evaluated"],
        target_met=progress["target_met"],
    )


def _entry(tensor: Tensor, replicas: AbstractReplicas) -> Entry:
    """Ranks that do not meet in every step have trained different tensors."""
    if replicas.is_synchronous:
        return Entry(REPLICATED, (tensor,))
    return Entry(AVERAGED, replicas.gather(tensor.detach()))


def _agreed(entry: Entry) -> Entry:
    """With the mean in place of what ranks have each for itself."""
    return Entry(REPLICATED, (mean_of(entry.parts),)) if entry.layout == AVERAGED else entry


def _is_of_scheme(name: str, entry: Entry) -> bool:
    """Whether it is what the scheme of one rank remembers of the way to its own weights."""
    return entry.layout == PER_RANK and name != "random" and not name.startswith("buffer/")


def _of_rank(name: str, entry: Entry, rank: int, size: int) -> Tensor | None:
    part = entry.of_rank(rank, size)
    return entry.parts[0] if part is None and name.startswith("buffer/") else part


def _tensors_of(model: State) -> tuple[tuple[str, Mapping[str, Tensor]], ...]:
    return ("parameter", model.parameters), ("buffer", model.buffers)


def _check_no_stranger(snapshot: Snapshot, state: TrainingState) -> None:
    """A tensor that the model has no place for was not meant for this model, whatever else fits."""
    known = {f"{kind}/{name}" for kind, own in _tensors_of(state.model) for name in own}
    strangers = sorted(n for n in snapshot.entries if n.startswith(("parameter/", "buffer/")) and n not in known)
    if strangers:
        raise CorruptFileError(f"checkpoint has an entry that the model lacks ({strangers[0]}); it is of another model")


def _find(tensors: Mapping[str, Tensor | None], key: str, shape: torch.Size | None = None) -> Tensor:
    tensor = tensors.get(key)
    if tensor is None:
        raise CorruptFileError(f"checkpoint lacks an entry ({key}); it is of another model or optimizer")
    if shape is not None and tensor.shape != shape:
        numbers = f"{key}: {tuple(tensor.shape)}, model: {tuple(shape)}"
        raise CorruptFileError(f"checkpoint entry has another shape ({numbers}); it is of another model")
    return tensor
