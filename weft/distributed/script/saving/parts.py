"""Parts of a script's state on their way into a checkpoint: which tensors each rank brings, of which kind.

part                              on N ranks it lies in the checkpoint
woven model, optimizer            as its plan has it: see saving_woven
loader, woven                     as rank 0 has it: ranks go through the same batches
anything else, all have the same  as JSON and tensors, once
anything else, ranks differ       as bytes, of every rank its own: each gets its own back where they are as many, else
                                  rank 0's
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.utils.data import DataLoader

from weft.distributed.script.saving.structure import Taken, take_apart
from weft.distributed.script.weaving.dtensors import cut_of_dtensor, is_dtensor, local_of
from weft.errors import UsageError
from weft.records.strict_json import decode_json, encode_json, parse_json
from weft.training.checkpoint import Cut, Entry, Kind

__all__ = [
    "OWN",
    "Brought",
    "bring_alike",
    "bring_own",
    "digest_of",
    "entry_of",
    "from_bytes",
    "has_state",
    "state_of",
    "take_part",
    "to_bytes",
]

OWN = "weft/own/"
"""Of a part or a tensor that each rank has its own of."""
_JSON = "json"


@dataclass(frozen=True)
class Brought:
    """A part as one rank brings it.

    Args:
        facts: for the index; rank 0's count.
    """

    facts: dict[str, Any]
    entries: Mapping[str, Entry]


def has_state(value: object) -> bool:
    """Whether it gives its state and takes it back, as a module, an optimizer, a scheduler or a scaler does."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def state_of(value: Any) -> Any:
    """The state of an object; a plain value is its own."""
    if not has_state(value):
        return value
    state = value.state_dict()
    return dict(state) if isinstance(value, nn.Module) else state


def take_part(name: str, value: Any) -> Taken:
    """A part as JSON and tensors.

    Raises:
        UsageError: it cannot be written as such.
    """
    if isinstance(value, DataLoader):
        raise UsageError(f"loader has no position to save ({name}: DataLoader); save the one that weave returned")
    return take_apart(name, state_of(value))


def bring_alike(taken: Taken, *, is_object: bool, is_mine: bool = True) -> Brought:
    """A part that all ranks have alike.

    Args:
        is_mine: whether this rank writes of it.
    """
    entries = {name: entry_of(tensor) for name, tensor in taken.tensors.items()} if is_mine else {}
    return Brought({"is_object": is_object, "structure": taken.structure}, entries)


def entry_of(tensor: Tensor, kind: Kind = "global", cut: Cut | None = None, replica: int | None = None) -> Entry:
    """A tensor as this rank has it: a part, where it is a DTensor or where a cut says so."""
    if is_dtensor(tensor):
        return Entry(local_of(tensor), kind, cut_of_dtensor(tensor), replica)
    return Entry.of_part(tensor, kind, cut, replica)


def bring_own(name: str, taken: Taken, *, is_object: bool) -> Brought:
    """A part that each rank has its own of."""
    if parts := [key for key, tensor in taken.tensors.items() if is_dtensor(tensor)]:
        raise UsageError(
            f"part has tensors of which ranks hold parts, and others that differ ({name}: {parts[0]}); save them apart"
        )
    own = f"{OWN}{name}"
    return Brought({"is_object": is_object, "own": own}, {own: Entry(to_bytes(taken), "own")})


def to_bytes(taken: Taken) -> Tensor:
    """All of it as one tensor of bytes, in itself a safetensors file."""
    tensors = {f"{_JSON}/{name}": _copy(tensor) for name, tensor in taken.tensors.items()}
    text = json.dumps(encode_json(taken.structure), allow_nan=False).encode()
    tensors[_JSON] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)


def from_bytes(content: Tensor) -> Taken:
    tensors = load(content.numpy().tobytes())
    structure = decode_json(parse_json(tensors.pop(_JSON).numpy().tobytes().decode()))
    return Taken(structure, {name.removeprefix(f"{_JSON}/"): tensor for name, tensor in tensors.items()})


def digest_of(taken: Taken) -> str:
    """The same for the same bits, and for no others; of tensors that lie in parts, whatever is in them."""
    digest = hashlib.sha256(json.dumps(encode_json(taken.structure)).encode())
    for name, tensor in taken.tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if is_dtensor(tensor):
            continue
        host = _copy(tensor)
        digest.update(host.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _copy(tensor: Tensor) -> Tensor:
    """In the memory of the host, and nobody else's: safetensors refuses tensors that share it."""
    return tensor.detach().to("cpu", copy=True).contiguous()
