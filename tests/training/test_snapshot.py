"""The state of a training as named tensors, and back."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.checkpoint.meeting import save_on
from tests.training.planted import StopAt, build_tiny, ignore
from weft.errors import CorruptFileError
from weft.specs import Mesh
from weft.training.checkpoint import Entry, Kind, Ranks, Snapshot, read_checkpoint
from weft.training.events import StepEnded
from weft.training.loop import TrainingState, train
from weft.training.optimizers import Adam, Optimizer
from weft.training.sampling import SamplerState
from weft.training.snapshot import restore, take_snapshot


def trained(**options: Any) -> TrainingState:
    task, state = build_tiny(**options)
    return train(task, state, emit=StopAt(StepEnded, 2), save=ignore)[0]


def test_the_names_and_kinds_of_a_checkpoint() -> None:
    # Every later level reads and extends these names.
    snapshot = take_snapshot(trained(), {"started": 5.0})
    layers = ("0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias")
    statistics = ("1.running_mean", "1.running_var", "1.num_batches_tracked")
    assert set(snapshot.entries) == {
        *(f"parameter/{name}" for name in layers),
        *(f"buffer/{name}" for name in statistics),
        *(f"slot/{name}/velocity" for name in layers),
        "optimizer/lr",
        "optimizer/step",
        "random",
    }
    assert {name for name, entry in snapshot.entries.items() if entry.kind == "own"} == {"random"}
    assert snapshot.step == 2
    assert snapshot.progress == {
        "samples": 8,
        "evaluated": 0,
        "target_met": False,
        "sampler": {"epoch": 0, "offset": 8},
        "consistency": None,
        "started": 5.0,
    }


def test_restored_state_is_the_state_that_was_taken() -> None:
    before = trained(optimizer=lambda: Optimizer(Adam(), lr=0.01))
    before = replace(before, evaluated=7, target_met=True)
    _, fresh = build_tiny(optimizer=lambda: Optimizer(Adam(), lr=0.01))
    after = restore(fresh, take_snapshot(before, {}))
    found, expected = take_snapshot(after, {}), take_snapshot(before, {})
    assert found.entries.keys() == expected.entries.keys()
    assert all(torch.equal(e.tensor, expected.entries[n].tensor) for n, e in found.entries.items())
    assert (found.step, found.progress) == (expected.step, expected.progress)
    assert after.sampler == SamplerState(0, 8) and after.target_met


def test_restored_tensors_are_those_that_the_executor_knows() -> None:
    _, fresh = build_tiny()
    after = restore(fresh, take_snapshot(trained(), {}))
    assert all(after.model.parameters[name] is tensor for name, tensor in fresh.model.parameters.items())


def test_parameter_names_with_a_slash() -> None:
    class Slashed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("in/weight", nn.Parameter(torch.ones(3, 1)))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.get_parameter("in/weight")

    before = trained(module=Slashed)
    after = restore(build_tiny(module=Slashed)[1], take_snapshot(before, {}))
    assert torch.equal(after.optimizer.slots["in/weight"]["velocity"], before.optimizer.slots["in/weight"]["velocity"])


def without(snapshot: Snapshot, name: str) -> Snapshot:
    return replace(snapshot, entries={n: e for n, e in snapshot.entries.items() if n != name})


@pytest.mark.parametrize(
    "name", ["parameter/0.weight", "buffer/1.running_mean", "random", "optimizer/lr", "optimizer/step"]
)
def test_missing_entry(name: str) -> None:
    with pytest.raises(CorruptFileError, match=rf"lacks an entry \({name}\); it is of another model or optimizer"):
        restore(build_tiny()[1], without(take_snapshot(trained(), {}), name))


def test_entry_of_another_shape() -> None:
    def narrow() -> nn.Module:
        return nn.Linear(3, 1)

    snapshot = take_snapshot(trained(module=narrow), {})
    wide = Entry(torch.ones(1, 1))  # would be broadcast without a word
    with pytest.raises(CorruptFileError, match=r"another shape \(parameter/weight: \(1, 1\), model: \(1, 3\)\)"):
        restore(build_tiny(module=narrow)[1], replace(snapshot, entries={**snapshot.entries, "parameter/weight": wide}))


@pytest.mark.parametrize("name", ["parameter/5.weight", "buffer/spare"])
def test_entry_that_the_model_lacks(name: str) -> None:
    snapshot = take_snapshot(trained(), {})
    entries = {**snapshot.entries, name: Entry(torch.ones(1))}
    with pytest.raises(CorruptFileError, match=rf"entry that the model lacks \({name}\)"):
        restore(build_tiny()[1], replace(snapshot, entries=entries))


# ---- ranks that each have weights of their own


OF_TWO_RANKS: dict[str, tuple[Kind, float, float]] = {
    "parameter/w": ("mean", 0.0, 3.0),
    "slot/w/count": ("mean", 4, 4),
    "buffer/statistics": ("mean", 1.0, 2.0),
    "random": ("own", 5, 6),
    "local/round": ("own", 7, 8),
}


def found_by(folder: Path, rank: int, size: int, own: str | None, **progress: str | None) -> dict[str, float]:
    """What one of so many ranks finds of what two ranks saved."""

    def snapshot_of(rank: int) -> Snapshot:
        entries = {name: Entry(torch.tensor(own[rank]), kind) for name, (kind, *own) in OF_TWO_RANKS.items()}
        return Snapshot(1, entries, dict(progress))

    path = save_on(2, folder, snapshot_of)
    found = read_checkpoint(path, Ranks(Mesh(rank, data=size), consistency=own))
    assert found.unfit == OF_TWO_RANKS.keys() - found.entries.keys()
    return {name: entry.tensor.item() for name, entry in found.entries.items()}


@pytest.mark.parametrize("progress", [{"consistency": "local(steps=2)"}, {}], ids=["same", "not said"])
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_with_the_consistency_of_a_checkpoint_get_what_was_their_own(
    tmp_path: Path, progress: dict[str, str], rank: int
) -> None:
    found = found_by(tmp_path, rank, 2, "local(steps=2)", **progress)
    assert found == {name: own[rank] for name, (_, *own) in OF_TWO_RANKS.items()}


@pytest.mark.parametrize(
    ("consistency", "progress"),
    [
        (None, {"consistency": "local(steps=2)"}),
        (None, {}),
        ("local(steps=2)", {"consistency": "gossip(graph=ring)"}),
        ("local(steps=2)", {"consistency": None}),
    ],
)
def test_ranks_with_another_consistency_get_the_mean_and_keep_randomness_and_statistics(
    tmp_path: Path, consistency: str | None, progress: dict[str, str | None]
) -> None:
    found = found_by(tmp_path, 1, 2, consistency, **progress)
    assert found == {"parameter/w": 1.5, "slot/w/count": 4, "buffer/statistics": 2.0, "random": 6}


def test_a_rank_more_gets_the_means_and_begins_afresh_where_it_has_no_own(tmp_path: Path) -> None:
    found = found_by(tmp_path, 2, 3, "local(steps=2)", consistency="local(steps=2)")
    assert found == {"parameter/w": 1.5, "slot/w/count": 4, "buffer/statistics": 1.5}
    # A rank that was there takes its randomness, but not what led to weights that it no longer has.
    first = found_by(tmp_path, 0, 3, "local(steps=2)", consistency="local(steps=2)")
    assert first == {**found, "random": 5}
    fresh = build_tiny()[1]
    snapshot = take_snapshot(trained(), {})
    entries = {name: entry for name, entry in snapshot.entries.items() if name != "random"}
    after = restore(fresh, replace(snapshot, entries=entries, unfit=frozenset({"random"})))
    assert torch.equal(after.model.random, fresh.model.random)
