"""Ranks that hold parts of layers, or some layers: any mesh of them loads what any other saved, to the same bits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.planted import StopAt, build_tiny, hash_of, ignore
from weft.distributed.group import AbstractGroup
from weft.distributed.placement.data_parallel import DataParallel
from weft.distributed.virtual import run_virtual
from weft.errors import CorruptFileError
from weft.graph import State
from weft.specs import Mesh
from weft.training.checkpoint import (
    CODEC,
    Cut,
    Entry,
    Ranks,
    compose,
    flat,
    fused_cut,
    latest_checkpoint,
    read_checkpoint,
    write_checkpoint,
    writing,
)
from weft.training.checkpoint.entry import subject_of
from weft.training.checkpoint.offers import Offer
from weft.training.events import StepEnded
from weft.training.loop import TrainingState, train
from weft.training.optimizers import Adam, Optimizer, OptimizerState
from weft.training.placement import AbstractPlacement, WholeModel
from weft.training.replicas import SoloReplicas
from weft.training.snapshot import ranks_of, readers_of, restore, take_snapshot

MESHES = {
    "one rank": Mesh(),
    "data": Mesh(data=2),
    "tensor": Mesh(tensor=2),
    "pipeline": Mesh(pipeline=2),
    "shard and tensor": Mesh(shard=2, tensor=2),
    "all": Mesh(pipeline=2, data=2, tensor=2),
    "ragged": Mesh(pipeline=2, shard=2, stages=(1, 2)),
}
LAYERS = ({"0", "1"}, {"4", "0.bias"})  # of the stages; a bias is tied, and in both
SHAPES = {f"parameter/{name}": tuple(p.shape) for name, p in build_tiny()[1].model.parameters.items()}
SHAPES |= {f"buffer/{name}": tuple(b.shape) for name, b in build_tiny()[1].model.buffers.items()}


class Split(WholeModel):  # type: ignore[misc]
    """On `tensor` every other of three heads' channels, on `shard` a range of every slot of what is left."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def holds(self, entry: str) -> bool:
        name = subject_of(entry).partition("/")[2]
        layers = LAYERS[self._mesh.coordinate("pipeline")]
        return self._mesh.pipeline == 1 or name in layers or name.split(".")[0] in layers

    def cut_of(self, name: str) -> Cut | None:  # type: ignore[override]
        subject = subject_of(name).replace("gradient/", "parameter/")
        shape, mesh = SHAPES.get(subject, ()), self._mesh
        cut = self._heads(shape)
        size = torch.Size(cut.held_shape if cut else shape).numel()
        if not name.startswith("slot/") or mesh.shard == 1:
            return cut
        begin, end = (size * at // mesh.shard for at in (mesh.coordinate("shard"), mesh.coordinate("shard") + 1))
        return compose(cut, Cut(cut.held_shape if cut else shape, flat(begin, end)))

    def _heads(self, shape: tuple[int, ...]) -> Cut | None:
        number, count = self._mesh.coordinate("tensor"), self._mesh.size("tensor")
        if 6 not in shape or count == 1:
            return None
        first, width = number * 2 // count, 2 // count
        return fused_cut(shape, shape.index(6), [(at + first, at + first + width) for at in (0, 2, 4)])


class OnMesh(SoloReplicas):  # type: ignore[misc]
    """A rank as a checkpoint sees it."""

    def __init__(self, group: AbstractGroup, mesh: Mesh) -> None:
        self._group, self._mesh = group, replace(mesh, rank=group.rank)
        self._placement = Split(self._mesh)

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    def gather(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return DataParallel(self._group).gather(tensor)

    @property
    def placement(self) -> AbstractPlacement:
        return self._placement

    def memory(self) -> Mapping[str, Entry]:
        """An equal share of a sum."""
        share = {name: torch.arange(6.0) / self._mesh.num_replicas for name in ("0.bias", "1.weight")}
        own, cut_of = self.own_of("parameter", share), self._placement.cut_of
        return {
            f"{CODEC}residual/{name}": Entry(tensor, "sum", cut_of(f"gradient/{name}")) for name, tensor in own.items()
        }

    def own_of(self, kind: str, tensors: Mapping[str, Tensor], slot: str = "") -> dict[str, Tensor]:
        entries = {name: f"{kind}/{name}{slot}" for name in tensors}
        held = {name: entry for name, entry in entries.items() if self._placement.holds(entry)}
        cuts = {name: self._placement.cut_of(entry) for name, entry in held.items()}
        return {name: cut.take(tensors[name]) if cut else tensors[name].detach().clone() for name, cut in cuts.items()}

    def own(self, state: TrainingState) -> TrainingState:
        """The state of this rank, where one rank has `state`."""
        model, optimizer = state.model, state.optimizer
        slots: dict[str, dict[str, Tensor]] = {}
        for slot in ("first_moment", "second_moment"):
            whole = {name: own[slot] for name, own in optimizer.slots.items()}
            for name, tensor in self.own_of("slot", whole, "/any").items():
                slots.setdefault(name, {})[slot] = tensor
        parts = State(self.own_of("parameter", model.parameters), self.own_of("buffer", model.buffers), model.random)
        return replace(state, model=parts, optimizer=OptimizerState(optimizer.shared, slots))


def tiny() -> Any:
    return build_tiny(optimizer=lambda: Optimizer(Adam(), lr=0.01))


def trained() -> TrainingState:
    task, state = tiny()
    return train(task, state, emit=StopAt(StepEnded, 2), save=ignore)[0]


def save_under(mesh: Mesh, folder: Path) -> None:
    def program(group: AbstractGroup) -> None:
        replicas = OnMesh(group, mesh)
        write_checkpoint(folder, take_snapshot(replicas.own(trained()), {}, replicas), ranks_of(replicas))

    run_virtual(program, mesh.num_ranks)


def check_loaded_under(mesh: Mesh, folder: Path) -> None:
    def program(group: AbstractGroup) -> bool:
        replicas = OnMesh(group, mesh)
        fresh, expected = replicas.own(tiny()[1]), replicas.own(trained())
        found = latest_checkpoint(folder, pytest.fail, readers_of(replicas, fresh.model))
        assert found is not None
        for name, entry in replicas.memory().items():
            assert torch.equal(found.entries[name].tensor, entry.tensor)
        if found.unfit:  # the randomness of a rank that is new
            found = replace(found, entries={**found.entries, "random": Entry(expected.model.random)}, unfit=frozenset())
        return hash_of(restore(fresh, found)) == hash_of(expected)

    assert all(run_virtual(program, mesh.num_ranks).results)


@pytest.mark.parametrize("saved", MESHES)
def test_any_mesh_loads_what_any_mesh_saved(saved: str, tmp_path: Path) -> None:
    save_under(MESHES[saved], tmp_path)
    for mesh in MESHES.values():
        check_loaded_under(mesh, tmp_path)


# ---- faults


def test_overlaps_that_nobody_resolves_are_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def as_offered(offers: Mapping[int, Sequence[Offer]]) -> dict[int, dict[Offer, Offer]]:
        return {rank: {offer: offer for offer in own} for rank, own in offers.items()}

    monkeypatch.setattr(writing, "without_overlaps", as_offered)
    with pytest.raises(AssertionError, match=r"ranks do not hold parameter/0\.bias once"):
        save_under(MESHES["ragged"], tmp_path)


def test_a_stage_reads_the_entries_of_its_layers_alone(tmp_path: Path) -> None:
    save_under(MESHES["pipeline"], tmp_path)
    path = tmp_path / "step-0000000002"
    elsewhere = frozenset(name for name in SHAPES if name.split("/")[1].startswith("4"))
    found = read_checkpoint(path, Ranks(elsewhere=elsewhere))
    assert not any(subject_of(name) in elsewhere for name in (*found.entries, *found.unfit))
    assert "slot/0.weight/first_moment" in found.entries


def test_a_tensor_that_no_rank_has_a_place_for_is_named(tmp_path: Path) -> None:
    save_under(MESHES["one rank"], tmp_path)

    def program(group: AbstractGroup) -> None:
        replicas = OnMesh(group, MESHES["pipeline"])
        model = replicas.own(tiny()[1]).model
        lacking = replace(model, parameters={n: p for n, p in model.parameters.items() if n != "4.weight"})
        found = latest_checkpoint(tmp_path, pytest.fail, readers_of(replicas, lacking))
        assert found is not None
        restore(replace(replicas.own(tiny()[1]), model=lacking), found)

    with pytest.raises(CorruptFileError, match=r"an entry that the model lacks \(parameter/4.weight\)"):
        run_virtual(program, 2)
