"""The equations of averaging in pairs, held against virtual ranks; and faults planted in these, which it must find."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from tests.distributed.consistency.pairs.paired import journals_of, run_pairs
from tests.proving.test_lockstep import case_of, small_mlp
from weft.distributed.consistency.pairs import Pair, slot
from weft.distributed.group import AbstractGroup
from weft.errors import CorruptFileError
from weft.proving.method import Evidence
from weft.proving.pair_equations import trace_pairs
from weft.proving.paired import Paired
from weft.proving.proof import Proof
from weft.training.optimizers import OptimizerState
from weft.training.recipe import Recipe
from weft.training.replicas import AbstractReplicas, Update

Apply = Callable[[Update, Mapping[str, Tensor | None]], OptimizerState]


def prove(recipe: Recipe, run: Path, size: int = 4, graph: str = "ring", apply: Apply = Update.apply) -> Proof:
    """Five batches on virtual ranks, whose updates are made by `apply`, against the equations."""
    case = case_of(recipe, f"data={size} consistency=gossip({graph},mix=pair)", 5)

    def work(group: AbstractGroup, replicas: AbstractReplicas) -> dict[str, Tensor]:
        group.clock.charge(0.001 * replicas.mesh.rank)
        return Paired().trace(case, replicas)

    with pytest.MonkeyPatch.context() as ranks_only:
        ranks_only.setattr(Update, "apply", apply)
        found, _, _ = run_pairs(case.plan, work, run=run)
    return Paired().judge(case, [Evidence([own for own in found if own is not None], run)])


@pytest.mark.parametrize(("size", "graph"), [(2, "ring"), (4, "exponential"), (5, "torus")])
def test_ranks_follow_the_equations_to_the_last_bit(size: int, graph: str, tmp_path: Path) -> None:
    proof = prove(small_mlp(), tmp_path, size, graph)
    assert proof.passed and proof.is_bitwise, proof.finding
    assert f"{size} ranks averaged by the equations" in proof.finding


def test_one_side_that_does_not_move_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_sided(own: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        for mine, theirs in zip(own, given, strict=True):
            theirs.add_(mine).mul_(0.5)

    monkeypatch.setattr(slot, "average", one_sided)
    assert not prove(small_mlp(), tmp_path).passed


def test_a_pair_that_is_not_atomic_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights change between the two sides' means."""

    def in_two(own: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        for mine, theirs in zip(own, given, strict=True):
            theirs.add_(mine).mul_(0.5)
            mine.add_(theirs).mul_(0.5)

    monkeypatch.setattr(slot, "average", in_two)
    assert not prove(small_mlp(), tmp_path).passed


def test_neighbours_that_mix_gradients_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay as they are; half of the gradient before, which is another rank's, comes to half of one's own."""
    before: dict[str, Tensor] = {}
    plain = Update.apply

    def mix(update: Update, gradients: Mapping[str, Tensor | None]) -> OptimizerState:
        own = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        mean = {name: (gradient + before.get(name, gradient)) / 2 for name, gradient in own.items()}
        before.update(own)
        return plain(update, mean)

    monkeypatch.setattr(slot, "average", lambda own, given: None)
    assert not prove(small_mlp(), tmp_path, apply=mix).passed


def test_a_lost_momentum_is_found(tmp_path: Path) -> None:
    recipe = small_mlp().with_setting("optimizer", "momentum")
    plain = Update.apply

    def forget(update: Update, gradients: Mapping[str, Tensor | None]) -> OptimizerState:
        for slots in update.state.slots.values():
            for tensor in slots.values():
                tensor.zero_()
        return plain(update, gradients)

    assert prove(recipe, tmp_path / "kept").is_bitwise
    assert not prove(recipe, tmp_path / "lost", apply=forget).passed


def test_records_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    recipe = small_mlp()
    prove(recipe, tmp_path, 2)
    first, second = journals_of(tmp_path, 2)
    torn = [event for event in second if not isinstance(event, Pair)]
    with pytest.raises(CorruptFileError, match="do not fit together"):
        trace_pairs(case_of(recipe, "data=2 consistency=gossip(ring,mix=pair)", 5), [first, torn])
