"""The trained weights of a run, as one whole model: from the chunks of any plan to plain files."""

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from weft.distributed.script.saving.saving import read_state_dict
from weft.errors import RunFolderError, UsageError
from weft.records.record import RunRecord
from weft.records.record_file import RECORD_NAME, read_record
from weft.records.run_folder import RunFolder
from weft.training.checkpoint import latest_checkpoint, read_checkpoint
from weft.training.checkpoint.reading import checkpoints_in
from weft.training.recipe import Recipe
from weft.training.weights import write_weights

__all__ = ["export_run", "weights_of_run"]


def export_run(run: Path, out: Path, *, seed: int | None = None, part: str | None = None) -> list[Path]:
    """Write the weights of a run, or of a checkpoint of a script, to a file or a folder; the files.

    Args:
        run: a run folder, or the path that `weft.save` was given.
        out: a file if its name ends in .safetensors, else a folder as Hugging Face lays it out.
        seed: of a run of several; by default the first.
        part: of a script's checkpoint, by the name that it was saved as; by default `model`.
    """
    if (run / RECORD_NAME).is_file():
        if part is not None:
            raise UsageError(f"a run has no parts ({run}, part: {part}); leave --part out")
        tensors, config = weights_of_run(run, seed)
        return write_weights(out, tensors, config)
    if seed is not None:
        raise UsageError(f"a script's checkpoint has no seeds ({run}, seed: {seed}); leave --seed out")
    if not checkpoints_in(run):
        raise RunFolderError(f"there is no run and no checkpoint ({run}); give a run folder, or that of weft.save")
    name = part or "model"
    state = read_state_dict(run, name)
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UsageError(f"part is no state of a model ({run}, part: {name}); name another with --part")
    return write_weights(out, state, {"weft": {"part": name}})


def weights_of_run(run: Path, seed: int | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Parameters and buffers of the newest whole checkpoint, by name, and what builds the model.

    Where ranks have weights of their own it is the mean of all, as for running statistics.
    """
    record = read_record(run)
    seed = _choose_seed(record, run, seed)
    folder = RunFolder(run).checkpoint / f"seed-{seed}"
    read = partial(read_checkpoint, is_wanted=lambda name: name.startswith(("parameter/", "buffer/")))
    found = latest_checkpoint(folder, lambda damage: None, read=read)
    if found is None:
        raise RunFolderError(f"run has no checkpoint (seed: {seed}, {folder}); let it train until the first")
    tensors = {name.partition("/")[2]: entry.tensor for name, entry in found.entries.items()}
    model = Recipe.from_dict(record.recipe).fixed.model
    about = {"recipe": record.name, "seed": seed, "step": found.step}
    return tensors, {"model_type": model.name, **dict(model.options), "weft": about}


def _choose_seed(record: RunRecord, run: Path, seed: int | None) -> int:
    known = [repetition.seed for repetition in record.repetitions]
    if seed is None:
        return known[0]
    if seed not in known:
        raise UsageError(f"run has no such seed ({run}: {seed}); it has {', '.join(map(str, known))}")
    return seed
