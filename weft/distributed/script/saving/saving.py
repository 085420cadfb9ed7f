"""`weft.save` and `weft.load`: all of a script's state, from any number of ranks under any plan to any other.

    weft.save("checkpoint", model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, epoch=epoch)
    values = weft.load("checkpoint", model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)

    checkpoint/                      absent until the first is whole
      step-0000000006/               the one before, in case the newest does not survive
      step-0000000007/               the seventh that was saved, by all ranks together

It is the format of docs/checkpoints.md. Every rank calls both.
"""

import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.atomic import use_new_folder
from weft.distributed.group.group import AbstractGroup
from weft.distributed.placement.whole import gather_whole
from weft.distributed.script.saving.loading import restore
from weft.distributed.script.saving.parts import has_state, state_of
from weft.distributed.script.saving.reading import Wanted, part_from
from weft.distributed.script.saving.stages import are_stages, check_names
from weft.distributed.script.saving.taking import do_together, take_parts
from weft.distributed.script.weaving.cuts import cut_of_tensor, entries_of
from weft.distributed.script.weaving.dtensors import is_dtensor, whole_of
from weft.distributed.script.weaving.weaving import Weaving, average_in_host_memory
from weft.distributed.script.world.world import find_world
from weft.errors import UsageError
from weft.specs import Mesh
from weft.training.checkpoint import Ranks, Snapshot, latest_checkpoint, write_checkpoint
from weft.training.checkpoint.reading import checkpoints_in
from weft.training.weights import is_weights, read_weights, write_weights

__all__ = ["export", "load", "read_state_dict", "save", "state_dict"]


def save(path: str | os.PathLike[str], /, **parts: Any) -> None:
    """Write a checkpoint of a script: every rank calls it, and each writes its share.

    The random state of torch, Python and NumPy goes with it. A process that is killed at any moment leaves the
    checkpoint before it, which is kept beside the newest. Between two saves of one path, `path` is a whole checkpoint;
    before the first it does not exist.

    Args:
        path: a folder, the same on all ranks; made when the first checkpoint in it is whole.
        parts: by any names: models, optimizers, schedulers, scalers and all else that has `state_dict` and
            `load_state_dict`; the loader that `weave` returned, whose position is kept; numbers, texts, tensors, and
            lists, tuples and dicts of them. Where ranks have different values, each gets its own back if they are as
            many, else all get rank 0's.

    Raises:
        UsageError: a value is neither JSON nor tensor, by name and type; or `path` is a file.
        StorageError: a file could not be written.
        OutOfStepError: ranks save other parts, or elsewhere.

    Example:
        weft.save("checkpoint", model=model, optimizer=optimizer, loader=loader, epoch=epoch, best=best)
    """
    world = find_world()
    world.settle()
    if world.is_server:
        return  # it is no rank: those who are save
    with world.meeting("weft.save", {"path": path, "parts": ", ".join(parts)}), ExitStack() as stack:
        ranks = _ranks_in(world.group)
        entries, progress = take_parts(parts, world.weavings, ranks, stack)
        _write(Path(path).absolute(), Snapshot(0, entries, progress), ranks)


def load(path: str | os.PathLike[str], /, **parts: Any) -> dict[str, Any]:
    """Go on where a checkpoint was saved: every rank calls it, after `weave`.

    The number of ranks and the plan may be others than those that saved. Random state is put back too. If the newest
    checkpoint is damaged, the one before it is taken, with a warning.

    Args:
        path: as given to `save`.
        parts: the objects to write into, by the names that `save` was given; one that is left out is not read.

    Returns:
        The plain values, by name.

    Raises:
        UsageError: there is no checkpoint, it lacks a part, or a part does not fit.
        CorruptFileError: no checkpoint is whole.

    Example:
        epoch = weft.load("checkpoint", model=model, optimizer=optimizer, loader=loader)["epoch"]
    """
    world = find_world()
    world.settle()
    for name, target in parts.items():
        if not has_state(target):
            kind = type(target).__name__
            raise UsageError(f"part cannot be loaded into ({name}: {kind}); leave it out: plain values are returned")
    with world.meeting("weft.load", {"path": path, "parts": ", ".join(parts)}):
        ranks = _ranks_in(world.group)
        return restore(partial(_find, Path(path), ranks), parts, world, ranks)


def state_dict(model: nn.Module) -> dict[str, Any]:
    """The whole state of a model as plain PyTorch has it, on the CPU, the same on every rank; every rank calls it.

    Under a plan whose ranks have weights of their own it is that of the model that all stand for.

    Example:
        weights = weft.state_dict(model)
        if weft.is_first:
            torch.save(weights, "model.pt")
    """
    world = find_world()
    world.settle()
    weaving = next((one for one in world.weavings if any(own is model for own in one.models)), None)
    if weaving is None or world.num_ranks == 1:
        return _copy_of(model)
    with world.meeting("weft.state_dict"), weaving.use_consensus(), _use_mean_statistics(weaving):
        return {**_copy_of(model), **_whole_tensors(model, weaving)}


def read_state_dict(path: str | os.PathLike[str], part: str = "model") -> Any:
    """A part of a checkpoint, or weights in plain files, by one process and without an object to write them into.

    Args:
        path: as given to `save`; or a .safetensors file, or a folder of them as Hugging Face lays it out.
        part: as named there; of a model comes its `state_dict`, of an optimizer that of a whole one.

    Raises:
        UsageError, CorruptFileError: as of `load`.

    Example:
        model.load_state_dict(weft.read_state_dict("checkpoint", "model"))
    """
    if is_weights(Path(path)) or Path(path).is_file():
        return read_weights(Path(path))
    found = _find(Path(path), Ranks(), Wanted(parts=[part]))
    return part_from(found.progress["parts"][part], found.entries)


def export(path: str | os.PathLike[str], model: nn.Module, config: Mapping[str, Any] | None = None) -> None:
    """Write the whole weights of a model to plain files that any tool reads; every rank calls it, and the first writes.

    Args:
        path: a file if its name ends in .safetensors, else a folder as Hugging Face lays it out. Neither exists yet.
        model: woven or not.
        config: for the config.json of a folder; by default that of the model, if it has one as transformers does.

    Raises:
        UsageError: there is something at the path already.
        StorageError: it could not be written.

    Example:
        weft.export("trained", model)
    """
    world, state = find_world(), state_dict(model)
    own = getattr(model, "config", None)
    if config is None and callable(getattr(own, "to_dict", None)):
        config = own.to_dict()  # type: ignore[union-attr]

    def write() -> None:
        if world.is_first:
            tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
            write_weights(Path(path).absolute(), _once(model, tensors), config)

    if world.num_ranks == 1:
        write()
        return
    with world.meeting("weft.export", {"path": path}):
        do_together(_ranks_in(world.group), write)


def _once(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of tied tensors the first name alone, as Hugging Face has it."""
    known: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        known.setdefault(id(value), name)
    own = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in tensors.items() if name not in own or known[id(own[name])] == name}


@contextmanager
def _use_mean_statistics(weaving: Weaving) -> Iterator[None]:
    """The mean of running statistics; then each rank has its own again, for to look at a model is not to train it."""
    buffers = list(weaving.buffers.values())
    before = [buffer.detach().clone() for buffer in buffers]
    average_in_host_memory(weaving.world.replicas, buffers)
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, was in zip(buffers, before, strict=True):
                buffer.copy_(was)


def _copy_of(model: nn.Module) -> dict[str, Any]:
    def copy(value: Any) -> Any:
        return whole_of(value.detach()).to("cpu", copy=True) if isinstance(value, Tensor) else value

    return {key: copy(value) for key, value in state_of(model).items()}


def _whole_tensors(model: nn.Module, weaving: Weaving) -> dict[str, Tensor]:
    """Those of which ranks of a plan hold parts, by their names in the state of the model. A collective call."""
    assert weaving.replicas is not None, "there are several ranks"
    if are_stages(weaving):
        check_names("state_dict", model, weaving, _ranks_in(weaving.world.group))
        tensors = {key: value for key, value in model.state_dict().items() if isinstance(value, Tensor)}
        return gather_whole(weaving.world.group, lambda name: None, tensors)
    mesh, entries = weaving.replicas.mesh, entries_of(weaving)
    state = {key: value for key, value in model.state_dict(keep_vars=True).items() if id(value) in entries}
    if mesh.num_ranks == mesh.num_replicas and not any(cut_of_tensor(t, weaving, entries) for t in state.values()):
        return {}
    found = weaving.replicas.placement.whole({entries[id(t)]: t for t in state.values() if not is_dtensor(t)})
    return {key: found[entries[id(tensor)]] for key, tensor in state.items() if entries[id(tensor)] in found}


def _ranks_in(group: AbstractGroup) -> Ranks:
    def gather(tensor: Tensor) -> tuple[Tensor, ...]:
        output = tensor.new_empty((group.size, *tensor.shape))
        group.all_gather(output, tensor.unsqueeze(0))
        return tuple(output)

    return Ranks(Mesh(group.rank, data=group.size), gather)


def _find(path: Path, ranks: Ranks, wanted: Wanted) -> Snapshot:
    def tell(damage: str) -> None:
        if ranks.mesh.rank == 0:
            warnings.warn(f"{damage}; the checkpoint before it is taken", stacklevel=4)

    found = latest_checkpoint(path, tell, ranks, wanted.read)
    if found is None:
        raise UsageError(f"there is no checkpoint ({path}); give the path that weft.save was given")
    return found


# Writing.


def _write(path: Path, snapshot: Snapshot, ranks: Ranks) -> None:
    """Write the next one of a path; nobody leaves before it can be read."""
    is_first = ranks.mesh.rank == 0
    with ExitStack() as stack:

        def open_folder() -> tuple[str, int] | None:
            return _open(path, stack) if is_first else None

        name, number = do_together(ranks, open_folder)[0]

        def write() -> None:
            write_checkpoint(path.parent / name, replace(snapshot, step=number), ranks)
            stack.close()

        do_together(ranks, write)


def _open(path: Path, stack: ExitStack) -> tuple[str, int]:
    """Where rank 0 has it written, beside `path`, and the number of the next one."""
    folder = stack.enter_context(_use_folder(path))
    found = checkpoints_in(folder)
    number = int(found[-1].name.removeprefix("step-")) + 1 if found else 1
    return folder.name, number


@contextmanager
def _use_folder(path: Path) -> Iterator[Path]:
    """The folder that is there, else one that will be it when the first checkpoint is whole: a script may ask whether
    `path` exists."""
    if path.exists():
        if not path.is_dir():
            raise UsageError(f"path is a file, and a checkpoint is a folder ({path}); give another")
        yield path
        return
    with use_new_folder(path) as scratch:
        yield scratch
    for left in path.parent.glob(f".{path.name}.*.tmp"):  # by a process that was killed before its first was whole
        shutil.rmtree(left, ignore_errors=True)
