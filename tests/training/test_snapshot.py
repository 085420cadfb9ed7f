"""The state of a training as named tensors, and back."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.planted import StopAt, build_tiny, ignore
from weft.errors import CorruptFileError
from weft.training.checkpoint import Entry, Snapshot
from weft.training.events import StepEnded
from weft.training.layout import AVERAGED, PER_RANK, REPLICATED
from weft.training.loop import TrainingState, train
from weft.training.optimizers import Adam, Optimizer
from weft.training.replicas import AbstractReplicas, SoloReplicas
from weft.training.sampling import SamplerState
from weft.training.snapshot import fit_to_replicas, restore, take_snapshot


def trained(**options: Any) -> TrainingState:
    task, state = build_tiny(**options)
    return train(task, state, emit=StopAt(StepEnded, 2), save=ignore)[0]


def test_the_names_and_layouts_of_a_checkpoint() -> None:
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
    assert {name for name, entry in snapshot.entries.items() if entry.layout == PER_RANK} == {"random"}
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
    assert all(torch.equal(e.parts[0], expected.entries[n].parts[0]) for n, e in found.entries.items())
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
    wide = Entry(REPLICATED, (torch.ones(1, 1),))  # would be broadcast without a word
    with pytest.raises(CorruptFileError, match=r"another shape \(parameter/weight: \(1, 1\), model: \(1, 3\)\)"):
        restore(build_tiny(module=narrow)[1], replace(snapshot, entries={**snapshot.entries, "parameter/weight": wide}))


@pytest.mark.parametrize("name", ["parameter/5.weight", "buffer/spare"])
def test_entry_that_the_model_lacks(name: str) -> None:
    snapshot = take_snapshot(trained(), {})
    entries = {**snapshot.entries, name: Entry(REPLICATED, (torch.ones(1),))}
    with pytest.raises(CorruptFileError, match=rf"entry that the model lacks \({name}\)"):
        restore(build_tiny()[1], replace(snapshot, entries=entries))


class Apart(SoloReplicas):  # type: ignore[misc]
    """Ranks with weights of their own, as far as a checkpoint knows."""

    consistency = "local(steps=2)"


OF_TWO_RANKS = {
    "parameter/w": Entry(AVERAGED, (torch.tensor([0.0]), torch.tensor([3.0]))),
    "slot/w/count": Entry(AVERAGED, (torch.tensor(4), torch.tensor(4))),
    "random": Entry(PER_RANK, (torch.tensor(5), torch.tensor(6))),
    "local/round": Entry(PER_RANK, (torch.tensor(7), torch.tensor(8))),
}


def entries_for(replicas: AbstractReplicas, **progress: str | None) -> dict[str, list[float]]:
    fitted = fit_to_replicas(Snapshot(1, OF_TWO_RANKS, progress), replicas).entries
    return {name: [part.item() for part in entry.parts] for name, entry in fitted.items()}


@pytest.mark.parametrize("progress", [{"consistency": "local(steps=2)"}, {}], ids=["same", "not said"])
def test_ranks_with_the_consistency_of_a_checkpoint_get_what_was_their_own(progress: dict[str, str]) -> None:
    found = entries_for(Apart(), **progress)
    assert found == {"parameter/w": [0, 3], "slot/w/count": [4, 4], "random": [5, 6], "local/round": [7, 8]}


def test_ranks_with_another_consistency_get_the_mean_and_keep_their_randomness() -> None:
    mean = {"parameter/w": [1.5], "slot/w/count": [4], "random": [5, 6]}
    assert entries_for(SoloReplicas(), consistency="local(steps=2)") == entries_for(SoloReplicas()) == mean
    assert entries_for(Apart(), consistency="gossip(graph=ring)") == entries_for(Apart(), consistency=None) == mean
