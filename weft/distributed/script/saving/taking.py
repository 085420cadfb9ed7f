"""All parts of a script's state, as one rank brings them to a checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, final

from torch import nn

from weft.distributed.script.saving.parts import (
    Brought,
    bring_alike,
    bring_own,
    digest_of,
    has_state,
    take_part,
    to_bytes,
)
from weft.distributed.script.saving.randomness import read_random
from weft.distributed.script.saving.reading import FORMAT, RANDOM
from weft.distributed.script.saving.stages import are_stages, check_names, join_structures
from weft.distributed.script.saving.structure import Taken, take_apart
from weft.distributed.script.saving.woven import (
    bring_memory,
    bring_model,
    bring_optimizer,
    buffers_of,
    facts_of,
)
from weft.distributed.script.weaving.weaving import Weaving
from weft.errors import StorageError, UsageError
from weft.training.checkpoint import Entry, Ranks

__all__ = ["do_together", "find_weavings", "take_parts"]


def do_together(ranks: Ranks, do: Callable[[], Any]) -> list[Any]:
    """The results of every rank, as JSON; if one failed, all raise its error. Nobody leaves before all are done."""
    result, failure = None, None
    try:
        result = do()
    except (UsageError, StorageError) as error:
        failure = error
    facts = {"failure": failure and str(failure), "is_storage": isinstance(failure, StorageError)}
    said = ranks.gather_json({"result": result, **facts})
    if failure is not None:
        raise failure
    for one in said:
        if one["failure"]:
            raise (StorageError if one["is_storage"] else UsageError)(one["failure"])
    return [one["result"] for one in said]


def find_weavings(parts: Mapping[str, Any], weavings: Sequence[Weaving]) -> dict[str, int]:
    """The number of the plan by which a part is trained, of models and optimizers."""
    owners = {id(own): n for n, one in enumerate(weavings) for own in (*one.models, *one.optimizers)}
    return {name: owners[id(value)] for name, value in parts.items() if id(value) in owners}


def take_parts(
    parts: Mapping[str, Any], weavings: Sequence[Weaving], ranks: Ranks, stack: ExitStack
) -> tuple[dict[str, Entry], dict[str, Any]]:
    """The entries that this rank brings, and the progress of the checkpoint. A collective call.

    Args:
        stack: until it is closed, models hold what all ranks stand for.
    """
    taking = _Taking(parts, weavings, ranks)
    taking.prepare()
    numbers = sorted(set(taking.woven.values()))
    for number in numbers:
        stack.enter_context(weavings[number].use_consensus())
    brought = {name: taking.bring(name) for name in parts}
    entries = {RANDOM: Entry(to_bytes(take_apart("random", read_random())), "own")}
    for one in brought.values():
        entries |= one.entries
    for number in numbers:
        entries |= bring_memory(number, weavings[number])
    progress = {
        "script": FORMAT,
        "ranks": ranks.mesh.num_replicas,
        "parts": {name: one.facts for name, one in brought.items()},
        "weavings": [facts_of(weaving) for weaving in weavings],
    }
    return entries, progress


@final
@dataclass
class _Taking:
    """Parts on their way: what is known of them before anything is brought."""

    parts: Mapping[str, Any]
    weavings: Sequence[Weaving]
    ranks: Ranks
    taken: dict[str, Taken] = field(default_factory=dict)
    alike: set[str] = field(default_factory=set)  # parts and buffers that all ranks have alike

    def __post_init__(self) -> None:
        self.woven = find_weavings(self.parts, self.weavings) if self.ranks.mesh.num_replicas > 1 else {}
        self._loaders = {id(weaving.loader) for weaving in self.weavings}

    def prepare(self) -> None:
        """Take apart what no plan has a hand in, and compare it with that of the other ranks."""
        everyone = do_together(self.ranks, self._take)
        self.alike = {name for name in everyone[0] if len({digests[name] for digests in everyone}) == 1}

    def _take(self) -> dict[str, str]:
        """Of each part, and of each buffer of a woven model, a digest."""
        digests = {}
        for name, value in self.parts.items():
            if name == "weft" or "/" in name:
                raise UsageError(f"name of a part is taken, or has a slash ({name}); choose another")
            digests[name] = ""
            if isinstance(value, nn.Module) and name in self.woven:
                for key, buffer in buffers_of(value).items():
                    digests[f"{name}/{key}"] = digest_of(Taken(None, {key: buffer}))
            elif name not in self.woven:
                self.taken[name] = take_part(name, value)
                is_compared = self.ranks.mesh.num_replicas > 1 and id(value) not in self._loaders
                digests[name] = digest_of(self.taken[name]) if is_compared else ""
        return digests

    def bring(self, name: str) -> Brought:
        value, rank = self.parts[name], self.ranks.mesh.rank
        if name in self.woven and isinstance(value, nn.Module):
            alike = {key.removeprefix(f"{name}/") for key in self.alike if key.startswith(f"{name}/")}
            return self._bring_model(name, value, self.weavings[self.woven[name]], alike)
        if name in self.woven and are_stages(self.weavings[self.woven[name]]):
            return bring_own(name, take_part(name, value), is_object=True)
        if name in self.woven:
            return bring_optimizer(name, value, self.weavings[self.woven[name]], self.ranks)
        is_loader = id(value) in self._loaders
        if name in self.alike or is_loader:
            return bring_alike(self.taken[name], is_object=has_state(value), is_mine=rank == 0 or not is_loader)
        return bring_own(name, self.taken[name], is_object=has_state(value))

    def _bring_model(self, name: str, model: nn.Module, weaving: Weaving, alike: set[str]) -> Brought:
        if are_stages(weaving):
            check_names(name, model, weaving, self.ranks)
        brought = bring_model(name, model, weaving, alike)
        if are_stages(weaving):
            brought.facts["structure"] = join_structures(brought.facts["structure"], self.ranks)
        return brought
