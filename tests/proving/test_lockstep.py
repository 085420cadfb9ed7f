"""The proof: passes for sound plans, bitwise where sums follow the order of ranks, and catches planted faults."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from tests.distributed.placement.cases import RankOrderGroup
from tests.distributed.virtual_plan import run_plan
from weft.distributed.collectives import AlgorithmChoice
from weft.distributed.group import AbstractGroup
from weft.distributed.placement import DataParallel
from weft.distributed.realise import RunSpec
from weft.distributed.virtual import run_virtual
from weft.graph import GradientSink, State
from weft.proving.lockstep import compare_ranks, trace_ranks, trace_references
from weft.proving.method import Case
from weft.proving.proof import Proof, Trace
from weft.recipes import digits_cnn, digits_mlp, pydoc_gpt, pydoc_lstm
from weft.specs import Mesh
from weft.training.build import build_splits
from weft.training.checkpoint import Entry
from weft.training.component import Component
from weft.training.datasets import Splits, splits_from_arrays
from weft.training.optimizers import OptimizerState
from weft.training.placement import AbstractPlacement
from weft.training.recipe import Fixed, Mutable, Recipe
from weft.training.replicas import AbstractReplicas, Consensus, Traffic, Update
from weft.training.sampling import share

STEPS = 3

MakeReplicas = Callable[[AbstractGroup], AbstractReplicas]


def with_settings(recipe: Recipe, **settings: object) -> Recipe:
    for key, value in settings.items():
        recipe = recipe.with_setting(key.replace("__", "."), str(value))
    return recipe


def small_mlp(**settings: object) -> Recipe:
    """Momentum shows the size of a gradient in the parameters; the last batch of an epoch is ragged."""
    base = {"model.hidden": 16, "batch_size": 66, "optimizer": "momentum", "optimizer.lr": 0.1, "schedule": "constant"}
    return with_settings(digits_mlp(), **{**base, **settings})


@functools.cache
def splits_of(data: Component) -> Splits:
    return build_splits(dataclasses.replace(digits_mlp(), fixed=dataclasses.replace(digits_mlp().fixed, data=data)))


def case_of(recipe: Recipe, plan: str, num_steps: int, splits: Splits | None = None) -> Case:
    chosen = recipe.with_setting("plan", plan)
    return Case(chosen, splits or splits_of(recipe.fixed.data), 0, num_steps)


def in_rank_order() -> MakeReplicas:
    return lambda group: DataParallel(RankOrderGroup(group))


def prove(
    recipe: Recipe,
    size: int,
    make: MakeReplicas | None = None,
    *,
    splits: Splits | None = None,
    choice: AlgorithmChoice | None = None,
    num_steps: int = STEPS,
) -> Proof:
    case, make = case_of(recipe, f"data={size}", num_steps, splits), make or in_rank_order()
    traces = run_virtual(lambda group: trace_ranks(case, make(group)), size, choice=choice).results
    return compare_ranks(list(traces), trace_references(case), case)


# ---- what passes

RECIPES = {
    "mlp": small_mlp(),
    "mlp, adam, warm-up": with_settings(digits_mlp(), model__hidden=16, batch_size=64),
    "mlp, clipped": small_mlp(clip_norm=0.1),
    "mlp, accumulated, dropout": small_mlp(accumulate=3, model__dropout=0.3),
    "cnn": with_settings(digits_cnn(), model__channels1=2, model__channels2=2, model__hidden=8, batch_size=64),
    "gpt, dropout": with_settings(
        pydoc_gpt(), model__width=8, model__num_layers=1, model__num_heads=2, model__dropout=0.2, batch_size=8
    ),
    "bucketed topics": with_settings(
        pydoc_lstm(), data="pydoc_topics", data__max_length=24, sampler="bucketed", model__hidden=8, batch_size=16
    ),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_in_order_are_one_rank_to_the_last_bit(recipe: Recipe, size: int) -> None:
    proof = prove(recipe, size)
    assert proof.passed and proof.is_bitwise, proof.finding
    assert f"{size} ranks gave the parameters of one rank after each of 3 steps, to the last bit" == proof.finding
    assert (proof.num_steps, proof.largest_error) == (STEPS, 0.0)


@pytest.mark.parametrize("topology", ["server(1)", "server(3)", "server(2,own)"])
def test_servers_pass_with_their_slots_collected(topology: str) -> None:
    case = case_of(small_mlp(optimizer="adam", clip_norm=0.1), f"data=3 topology={topology}", STEPS)
    spec = RunSpec.of(case.recipe, (0,))
    traces = run_plan(case.plan, lambda _group, replicas: trace_ranks(case, replicas), spec=spec).results[:3]
    proof = compare_ranks(list(traces), trace_references(case), case)
    assert proof.passed and proof.is_bitwise, proof.finding


@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving_doubling"])
def test_another_order_of_summation_passes_within_the_tolerance(algorithm: str) -> None:
    proof = prove(small_mlp(), 5, DataParallel, choice=AlgorithmChoice(algorithm))  # type: ignore[arg-type]
    assert proof.passed and not proof.is_bitwise, proof.finding
    assert 0 < proof.largest_error <= proof.tolerance
    assert "of each tensor's largest value" in proof.finding


def test_ranks_without_samples_in_the_last_batch() -> None:
    splits = splits_of(digits_mlp().fixed.data)
    batch_size = next(size for size in range(8, 200) if 0 < len(splits.train) % size < 3)
    proof = prove(small_mlp(batch_size=batch_size), 4)
    assert proof.passed and proof.is_bitwise, proof.finding


def test_ignored_targets_of_arrays_do_not_weigh() -> None:
    # Regression: only data sets with lengths were weighed by targets; an array may have IGNORED ones too.
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 6, generator=generator), torch.randint(0, 3, (40,), generator=generator)
    y[:15] = -100
    splits = splits_from_arrays(x, y, x[:5], y[20:25], x[5:9], y[30:34])
    recipe = Recipe(
        "arrays",
        "",
        Fixed(Component("mlp", hidden=4), Component("arrays", path=""), Component("cross_entropy"), epochs=1),
        Mutable(batch_size=16, optimizer=Component("sgd", lr=0.1), sampler=Component("ordered")),
    )
    proof = prove(recipe, 2, splits=splits)
    assert proof.passed, proof.finding


# ---- planted faults


class Faulty(AbstractReplicas):
    """Does what the inner replicas do; a fault changes one of its methods."""

    def __init__(self, inner: AbstractReplicas) -> None:
        self.inner = inner

    @property
    def mesh(self) -> Mesh:
        return self.inner.mesh

    @property
    def placement(self) -> AbstractPlacement:
        return self.inner.placement

    @property
    def is_synchronous(self) -> bool:
        return self.inner.is_synchronous

    def join(self, model: State) -> None:
        self.inner.join(model)

    def next_step(self, step: int) -> int:
        return self.inner.next_step(step)

    def share(self, indices: Tensor) -> Tensor:
        return self.inner.share(indices)

    def begin(self, weight: float) -> GradientSink:
        return self.inner.begin(weight)

    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        return self.inner.finish(loss, update)

    def traffic(self) -> Traffic:
        return self.inner.traffic()

    def agree_to_stop(self, wish: bool) -> bool:
        return self.inner.agree_to_stop(wish)

    def agree_to_save(self, wish: bool) -> bool:
        return self.inner.agree_to_save(wish)

    def dismiss(self) -> None:
        self.inner.dismiss()

    def sum(self, tensor: Tensor) -> Tensor:
        return self.inner.sum(tensor)

    def gather(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return self.inner.gather(tensor)

    def collect(self, state: OptimizerState) -> OptimizerState:
        return self.inner.collect(state)

    def use_consensus(self, model: State) -> AbstractContextManager[Consensus]:
        return self.inner.use_consensus(model)

    def memory(self) -> Mapping[str, Entry]:
        return self.inner.memory()

    def remember(self, step: int, entries: Mapping[str, Entry]) -> None:
        self.inner.remember(step, entries)


class NoBroadcast(Faulty):
    def join(self, model: State) -> None:
        own = {name: parameter.detach().clone() for name, parameter in model.parameters.items()}
        self.inner.join(model)
        with torch.no_grad():
            for name, parameter in model.parameters.items():
                parameter.copy_(own[name])


class OverlappingShares(Faulty):
    def share(self, indices: Tensor) -> Tensor:
        return share(indices, max(0, self.mesh.rank - 1), self.mesh.num_replicas)


class SumForMean(Faulty):
    def begin(self, weight: float) -> GradientSink:
        return self.inner.begin(weight * self.mesh.num_replicas)


class MeanOfMeans(Faulty):
    """Right as long as shares are equal: only the ragged last batch shows it."""

    def begin(self, weight: float) -> GradientSink:
        return self.inner.begin(1 / self.mesh.num_replicas)


class BucketLeftOut(Faulty):
    """The gradients of one layer never leave their rank: only rank 0's count, on all."""

    def begin(self, weight: float) -> GradientSink:
        add = self.inner.begin(weight)

        def sink(name: str, gradient: Tensor | None) -> None:
            is_lost = self.mesh.rank > 0 and name.endswith("bias")
            add(name, torch.zeros_like(gradient) if is_lost and gradient is not None else gradient)

        return sink


class OneStepLate(Faulty):
    def __init__(self, inner: AbstractReplicas) -> None:
        super().__init__(inner)
        self.kept: dict[str, Tensor] = {}

    def begin(self, weight: float) -> GradientSink:
        add = self.inner.begin(weight)

        def sink(name: str, gradient: Tensor | None) -> None:
            assert gradient is not None
            late = self.kept.get(name, torch.zeros_like(gradient))
            self.kept[name] = gradient.clone()
            add(name, late)

        return sink


class FlippedBit(Faulty):
    """The lowest bit of one number of one rank, at the last step: far below any tolerance."""

    num_finished = 0

    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        result = self.inner.finish(loss, update)
        self.num_finished += 1
        if self.mesh.rank == 1 and self.num_finished == STEPS:
            last = list(update.parameters.values())[-1].detach()
            last.view(torch.int32)[0] ^= 1
        return result


FAULTS: dict[type[Faulty], str] = {
    NoBroadcast: "replicas differ after step 1",
    OverlappingShares: "after step 1, ",
    SumForMean: "after step 1, ",
    MeanOfMeans: "after step 2, ",
    BucketLeftOut: "after step 1, ",
    OneStepLate: "after step 1, ",
    FlippedBit: "replicas differ after step 3: .*bias of rank 1 is not that of rank 0",
}


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_every_planted_fault_is_caught(fault: type[Faulty], optimizer: str) -> None:
    """Two steps to the end of the epoch, of which the second is ragged, and one of the next."""
    recipe = small_mlp(optimizer=optimizer)
    sound = in_rank_order()
    proof = prove(recipe, 3, lambda group: fault(sound(group)))
    assert not proof.passed and not proof.is_bitwise
    assert re.match(FAULTS[fault], proof.finding), proof.finding
    assert prove(recipe, 3, lambda group: Faulty(sound(group))).passed


def test_adam_alone_would_hide_a_wrong_scale() -> None:
    """Why slots are compared: Adam's parameters after a sum are those after a mean, up to its epsilon."""
    recipe, sound = small_mlp(optimizer="adam", optimizer__lr=0.001), in_rank_order()
    case = dataclasses.replace(case_of(recipe, "data=2", STEPS), tolerance=1e-4)
    references = trace_references(case)
    traces = run_virtual(lambda group: trace_ranks(case, SumForMean(sound(group))), 2).results
    without_slots = [parameters_only(trace) for trace in traces], [parameters_only(trace) for trace in references]
    assert compare_ranks(*without_slots, case).passed
    assert not compare_ranks(list(traces), references, case).passed


def parameters_only(trace: Trace) -> Trace:
    return [{name: tensor for name, tensor in step.items() if "(" not in name} for step in trace]


# ---- the comparison itself


def compare(ranks: list[Trace], reference: Trace) -> Proof:
    case = case_of(small_mlp(), f"data={len(ranks)}", len(reference))
    return compare_ranks(ranks, [reference] * len(ranks), case)


def trace_of(*values: list[float]) -> Trace:
    return [{"w": torch.tensor(value)} for value in values]


def test_the_first_difference_is_told_with_its_place() -> None:
    reference = [{"w": torch.zeros(2, 3), "b": torch.ones(2)}] * 2
    wrong = [reference[0], {"w": torch.zeros(2, 3), "b": torch.tensor([1.0, 1.5])}]
    proof = compare([wrong, wrong], reference)
    assert proof.finding == "after step 2, b[1] of rank 0 is off by 0.5 of its largest value"
    assert (proof.passed, proof.largest_error) == (False, 0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_does_not_pass(bad: float) -> None:
    assert not compare([trace_of([bad, 1.0])] * 2, trace_of([1.0, 1.0])).passed
    assert not compare([trace_of([1.0, 1.0])] * 2, trace_of([bad, 1.0])).passed
    assert not compare([trace_of([bad, 1.0])] * 2, trace_of([bad, 1.0])).passed


def test_equal_replicas_that_are_all_wrong_do_not_pass() -> None:
    assert not compare([trace_of([2.0])] * 3, trace_of([1.0])).passed


def test_right_and_wrong_replicas_do_not_pass() -> None:
    proof = compare([trace_of([1.0]), trace_of([1.0 + 2.0**-23])], trace_of([1.0]))
    assert proof.finding == "replicas differ after step 1: w of rank 1 is not that of rank 0"


@pytest.mark.parametrize("found", [[{"w": torch.ones(1)}], [{"w": torch.ones(1), "b": torch.ones(1)}] * 2])
def test_traces_of_another_shape_are_no_proof(found: Trace) -> None:
    """A step or a tensor too few is a fault of the run, not a pass."""
    assert not compare([found, found], trace_of([1.0], [1.0])).passed


# ---- losses, gradients and float64


def test_gradients_and_the_loss_are_traced() -> None:
    case = case_of(small_mlp(), "data=2", 1)
    (trace,) = trace_references(case)[0]
    assert "loss" in trace
    assert sum(name.endswith("(gradient)") for name in trace) == sum(name.endswith("(velocity)") for name in trace) > 0


def test_a_gradient_that_is_wrong_for_adam_alone_is_caught() -> None:
    """Adam's first step is the same for twice the gradient: its slots and the gradient tell."""
    case = case_of(small_mlp(optimizer="adam"), "data=2", 1)
    references = trace_references(case)
    wrong = [{**step, **{n: 2 * t for n, t in step.items() if n.endswith("(gradient)")}} for step in references[0]]
    assert not compare_ranks([wrong, wrong], [references[0]] * 2, case).passed


def test_float64_shows_no_more_than_its_own_rounding() -> None:
    case = dataclasses.replace(case_of(small_mlp(), "data=3", 4), dtype=torch.float64, tolerance=1e-13)
    traces = run_virtual(lambda group: trace_ranks(case, DataParallel(group)), 3).results
    assert traces[0][0]["loss"].dtype == torch.float64
    proof = compare_ranks(list(traces), trace_references(case), case)
    assert proof.passed and 0 <= proof.largest_error < 1e-13, proof.finding
