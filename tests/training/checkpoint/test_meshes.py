"""Any mesh loads what any mesh saved, to the same bits; every rank writes and reads its part."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tests.training.checkpoint.meeting import load_on, ranks_over, save_on
from tests.training.planted import StopAt, build_tiny, hash_of, ignore, module_of_every_kind, module_with_dropout
from weft.distributed.group import AbstractGroup
from weft.distributed.placement.data_parallel import DataParallel
from weft.distributed.placement.mesh import MeshGroups
from weft.distributed.virtual import run_virtual
from weft.errors import CorruptFileError, StorageError
from weft.specs import Mesh
from weft.training.checkpoint import (
    Cut,
    Entry,
    Part,
    Ranks,
    Snapshot,
    flat,
    latest_checkpoint,
    read_checkpoint,
    reading,
    write_checkpoint,
    writing,
)
from weft.training.checkpoint.index import read_index
from weft.training.checkpoint.offers import Offer, assign_writers
from weft.training.checkpoint.part import Overlap, copy_overlaps
from weft.training.events import StepEnded
from weft.training.loop import TrainingState, train
from weft.training.optimizers import Adam, Optimizer, OptimizerState, TorchOptimizer
from weft.training.placement import AbstractPlacement, WholeModel
from weft.training.replicas import SoloReplicas
from weft.training.snapshot import ranks_of, restore, take_snapshot

MESHES = {
    "one rank": Mesh(),
    "data=2": Mesh(data=2),
    "shard=2": Mesh(shard=2),
    "data=2 shard=2": Mesh(data=2, shard=2),
    "shard=8": Mesh(shard=8),  # more ranks than some tensors have elements
}
CASES: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": lambda: Optimizer(Adam(), lr=0.01), "module": module_with_dropout},
    # Keeps a number beside its moments.
    "torch": {"optimizer": lambda: TorchOptimizer(torch.optim.NAdam, lr=0.01), "module": module_with_dropout},
    # The mean of what two have is exact.
    "statistics": {"module": module_of_every_kind},
}
MATRIX = [
    (case, saved) for case in CASES for saved, mesh in MESHES.items() if case != "statistics" or mesh.num_ranks <= 2
]


class Ranges(WholeModel):  # type: ignore[misc]
    """On the axis `shard` every rank holds a range of every flattened slot."""

    def __init__(self, mesh: Mesh, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._mesh, self._shapes = mesh, shapes

    def cut_of(self, name: str) -> Cut | None:  # type: ignore[override]
        kind, _, rest = name.partition("/")
        if kind != "slot" or self._mesh.shard == 1:
            return None
        shape = self._shapes[rest.rpartition("/")[0]]
        bounds = torch.Size(shape).numel() * torch.arange(self._mesh.shard + 1) // self._mesh.shard
        start, end = list(pairwise(bounds.tolist()))[self._mesh.coordinate("shard")]
        return Cut(shape, flat(start, end))


class OnMesh(SoloReplicas):  # type: ignore[misc]
    """A rank as a checkpoint sees it."""

    def __init__(self, group: AbstractGroup, mesh: Mesh, parameters: Mapping[str, Tensor]) -> None:
        self._group, self._mesh = group, mesh
        self._shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    def gather(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return DataParallel(self._group).gather(tensor)

    @property
    def placement(self) -> AbstractPlacement:
        return Ranges(self._mesh, self._shapes)

    def own(self, state: TrainingState) -> TrainingState:
        """The state of this rank, where one rank has `state`."""
        slots: dict[str, dict[str, Tensor]] = {}
        for name, whole in state.optimizer.slots.items():
            cut = self.placement.cut_of(f"slot/{name}/any")
            slots[name] = {slot: _part(tensor, cut) for slot, tensor in whole.items()}
        return replace(state, optimizer=OptimizerState(state.optimizer.shared, slots))


def _part(tensor: Tensor, cut: Cut | None) -> Tensor:
    if cut is None or not tensor.dim():
        return tensor
    return cut.take(tensor)


def trained(case: str) -> TrainingState:
    task, state = build_tiny(**CASES[case])
    return train(task, state, emit=StopAt(StepEnded, 2), save=ignore)[0]


def save_under(mesh: Mesh, folder: Path, case: str) -> None:
    def program(group: AbstractGroup) -> None:
        state = trained(case)
        replicas = OnMesh(group, replace(mesh, rank=group.rank), state.model.parameters)
        write_checkpoint(folder, take_snapshot(replicas.own(state), {}, replicas), ranks_of(replicas))

    run_virtual(program, mesh.num_ranks)


def check_loaded_under(mesh: Mesh, folder: Path, case: str) -> None:
    def program(group: AbstractGroup) -> tuple[str, str]:
        expected, fresh = trained(case), build_tiny(**CASES[case])[1]
        replicas = OnMesh(group, replace(mesh, rank=group.rank), fresh.model.parameters)
        snapshot = latest_checkpoint(folder, pytest.fail, ranks_of(replicas))
        assert snapshot is not None
        if snapshot.unfit:  # the randomness of a rank that is new
            snapshot = replace(snapshot, entries={**snapshot.entries, "random": Entry(expected.model.random)})
        return hash_of(restore(fresh, replace(snapshot, unfit=frozenset()))), hash_of(replicas.own(expected))

    for found, expected in run_virtual(program, mesh.num_ranks).results:
        assert found == expected


@pytest.mark.parametrize(("case", "saved"), MATRIX)
def test_any_mesh_loads_what_any_mesh_saved(tmp_path: Path, case: str, saved: str) -> None:
    save_under(MESHES[saved], tmp_path, case)
    for mesh in MESHES.values():
        check_loaded_under(mesh, tmp_path, case)


def test_a_load_that_loses_one_element_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lossy(found: Sequence[Overlap], target: Tensor, source: Tensor) -> int:
        copied = copy_overlaps(found, target, source)
        target.reshape(-1)[-1:] = 0
        return copied

    save_under(Mesh(shard=2), tmp_path, "adam")
    monkeypatch.setattr(reading, "copy_overlaps", lossy)
    with pytest.raises(AssertionError):
        check_loaded_under(Mesh(), tmp_path, "adam")


def test_ranks_that_hold_parts_go_on_from_the_mean_of_ranks_that_had_weights_of_their_own(tmp_path: Path) -> None:
    velocity = torch.arange(6.0).view(2, 3)
    save_on(2, tmp_path, lambda rank: Snapshot(1, {"slot/w/velocity": Entry(velocity * (1 + 2 * rank), "mean")}))
    found = load_on(2, tmp_path, lambda rank: lambda name: Cut((2, 3), flat(3 * rank, 3 * rank + 3)))
    parts = [snapshot.entries["slot/w/velocity"].tensor for snapshot in found if snapshot]
    assert [part.tolist() for part in parts] == [[0, 2, 4], [6, 8, 10]]


# ---- who writes


@dataclass(frozen=True)
class Held:
    """Snapshots of two ranks: something that both have, something that each has a part of, something of their own."""

    rows: int = 4

    def __call__(self, rank: int) -> Snapshot:
        half = self.rows // 2
        column = torch.arange(float(self.rows)).view(self.rows, 1)
        entries = {f"parameter/{i}": Entry(torch.full((8,), float(i))) for i in range(6)}
        box = Cut((self.rows, 1), Part((rank * half, 0), (half, 1)))
        entries["column"] = Entry(column[rank * half : rank * half + half], cut=box)
        entries["random"] = Entry(torch.tensor([rank]), "own")
        return Snapshot(5, entries, {"of": rank})


def test_every_rank_writes_a_file_and_all_of_them_about_as_much(tmp_path: Path) -> None:
    path = save_on(2, tmp_path, Held())
    files = [load_file(path / f"rank-{rank:05d}.safetensors") for rank in range(2)]
    assert sorted(path.name for path in path.iterdir()) == ["index.json", *sorted(f.name for f in path.glob("rank*"))]
    assert [sum(name.startswith("parameter/") for name in file) for file in files] == [3, 3]
    assert [sorted(name for name in file if name.startswith("column")) for file in files] == [
        ["column[0:2, 0:1]"],
        ["column[2:4, 0:1]"],
    ]
    assert read_checkpoint(path).progress == {"of": 0}


def test_chunks_go_to_those_who_have_them_the_largest_first() -> None:
    def offer(name: str, size: int) -> Offer:
        return Offer(name, "global", torch.uint8, (size,), None, flat(0, size))

    own, both = offer("own", 5), [offer("small", 1), offer("large", 6), offer("middle", 3)]
    writers = assign_writers({0: both, 1: [own, *both], 2: []})
    assert {offer.name: rank for offer, rank in writers.items()} == {"own": 1, "large": 0, "middle": 1, "small": 0}


def test_ranks_of_one_replica_write_what_is_its_own_once(tmp_path: Path) -> None:
    def program(group: AbstractGroup) -> None:
        groups = MeshGroups(group, Mesh(group.rank, data=2, tensor=2))
        replicas = DataParallel(groups.replicas, world=groups.world, mesh=groups.mesh)
        entries = {"random": Entry(torch.tensor([groups.mesh.replica]), "own"), "x": Entry(torch.ones(3))}
        column = groups.mesh.coordinate("tensor")
        entries["columns"] = Entry(torch.full((2, 1), column), cut=Cut((2, 2), Part((0, column), (2, 1))))
        write_checkpoint(tmp_path, Snapshot(1, entries), ranks_of(replicas))
        groups.close()

    run_virtual(program, 4)
    rows = read_index(tmp_path / "step-0000000001").rows
    assert [len(rows[name].tensors) for name in ("random", "x")] == [2, 1]
    assert [len(rows[name].tensors[0].chunks) for name in ("random", "x", "columns")] == [1, 1, 2]
    found = [read_checkpoint(tmp_path / "step-0000000001", Ranks(Mesh(rank, data=2, tensor=2))) for rank in range(4)]
    assert [snapshot.entries["random"].tensor.item() for snapshot in found] == [0, 0, 1, 1]
    assert all(snapshot.entries["columns"].tensor.tolist() == [[0, 1], [0, 1]] for snapshot in found)


def test_ranks_that_do_not_meet_have_one_writer(tmp_path: Path) -> None:
    for rank in (1, 0):
        snapshot = Held()(0) if rank else Snapshot(5, {"x": Entry(torch.ones(1))})
        write_checkpoint(tmp_path, snapshot, Ranks(Mesh(rank, data=2)))
        assert tmp_path.exists() and len(list(tmp_path.iterdir())) == 1 - rank
    assert read_checkpoint(tmp_path / "step-0000000005").entries.keys() == {"x"}


def test_ranks_that_together_lack_a_part_write_no_checkpoint(tmp_path: Path) -> None:
    def lacking(rank: int) -> Snapshot:
        return Snapshot(1, {"x": Entry(torch.ones(2), cut=Cut((6,), flat(3 * rank, 3 * rank + 2)))})

    with pytest.raises(AssertionError, match="ranks do not hold x once"):
        save_on(2, tmp_path, lacking)
    assert list(tmp_path.iterdir()) == []


# ---- who reads


def chunk_in_file_of_rank_1(path: Path) -> Path:
    return path / "rank-00001.safetensors"


def test_a_rank_reads_the_files_that_it_needs_alone(tmp_path: Path) -> None:
    path = save_on(2, tmp_path, lambda rank: Snapshot(1, {"x": Held()(rank).entries["column"]}))
    chunk_in_file_of_rank_1(path).unlink()
    upper = Cut((4, 1), flat(0, 2))
    (found,) = load_on(1, tmp_path, lambda rank: lambda name: upper)
    assert found is not None and found.entries["x"].tensor.tolist() == [0.0, 1.0]
    with pytest.raises(CorruptFileError, match=r"entry: x, offset: \(2, 0\), length: \(2, 1\), file: .*rank-00001"):
        read_checkpoint(path)


def test_damage_that_one_rank_meets_sends_all_to_the_checkpoint_before(tmp_path: Path) -> None:
    for step in (1, 2):
        path = save_on(2, tmp_path, lambda rank, step=step: replace(Held()(rank), step=step))  # type: ignore[misc]
    random = read_index(path).rows["random"].tensors[1].chunks[0]
    assert random.file == chunk_in_file_of_rank_1(path).name
    content = bytearray(chunk_in_file_of_rank_1(path).read_bytes())
    content[len(content) - load_size(path, "random")] ^= 1
    chunk_in_file_of_rank_1(path).write_bytes(content)
    said: list[tuple[int, str]] = []
    found = load_on(2, tmp_path, on_damage=lambda rank, text: said.append((rank, text)))
    assert [snapshot and snapshot.step for snapshot in found] == [1, 1]
    assert sorted(rank for rank, _ in said) == [0, 1]
    assert all("checksum differs (entry: random, offset: (0,), length: (1,), file: " in text for _, text in said)


def load_size(path: Path, name: str) -> int:
    """How far from the end of the file of rank 1 the bytes of an entry begin."""
    tensors = load_file(chunk_in_file_of_rank_1(path))
    file = chunk_in_file_of_rank_1(path).read_bytes()
    return len(file) - file.rindex(tensors[name].numpy().tobytes())


# ---- a rank that cannot write


def test_a_rank_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    def program(group: AbstractGroup) -> None:
        folder = tmp_path / ("here" if group.rank == 0 else "elsewhere")
        write_checkpoint(folder, Held()(group.rank), ranks_over(group))

    with pytest.raises(StorageError, match=r"does not see the folder .*rank-00001.*one shared --out"):
        run_virtual(program, 2)
    assert list((tmp_path / "here").iterdir()) == []


def test_a_full_disk_of_one_rank_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: object, file: Path) -> None:
        if "rank-00001" in file.name:
            raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr(writing, "save_file", full)
    monkeypatch.setattr(writing, "sync", lambda path: None)
    with pytest.raises(StorageError, match=r"rank-00001.safetensors: No space left .*; free space"):
        save_on(2, tmp_path, Held())
    assert list(tmp_path.iterdir()) == []
