"""Checkpoints: named tensors in chunks, as safetensors files with a JSON index.

    checkpoint/
      step-0000000040/
        index.json                 progress, and of every entry shape, type and chunks (offset, length, file, checksum)
        rank-00000.safetensors     the chunks that rank 0 wrote
        rank-00001.safetensors     the chunks that rank 1 wrote
      step-0000000080/             newest last; the one before is kept, in case the newest does not survive

Any mesh loads what any mesh saved: a rank says which part of an entry it holds, at saving and at loading.
"""

from weft.training.checkpoint.cut import Cut, HeldPart, compose, fused_cut, whole_cut
from weft.training.checkpoint.entry import CODEC, Entry, Kind, Ranks, Snapshot
from weft.training.checkpoint.part import Part, flat, whole
from weft.training.checkpoint.reading import latest_checkpoint, read_checkpoint
from weft.training.checkpoint.writing import write_checkpoint

__all__ = [
    "CODEC",
    "Cut",
    "Entry",
    "HeldPart",
    "Kind",
    "Part",
    "Ranks",
    "Snapshot",
    "compose",
    "flat",
    "fused_cut",
    "latest_checkpoint",
    "read_checkpoint",
    "whole",
    "whole_cut",
    "write_checkpoint",
]
