"""Proof that two executors compute the same: the same batches; losses, gradients and parameters compared every step.

    bitwise pair      A and B each train on their own; everything must be equal to the last bit
                      (where A has its update in the graph, that is a third training, compared by its parameters)
    pair to a tolerance
        one step      A also computes each step from B's state: loss, gradients, statistics within the tolerance
        all steps     A on its own: losses and parameters, taken as one vector, within a hundred times the tolerance

Only from one state can gradients be held to a tight tolerance: an optimizer that divides by a gradient's size, as Adam
does, makes a whole step of what is rounding in a gradient that should be nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.errors import UsageError
from weft.graph import Difference, State, relative_error
from weft.proving.first_operator import blame_operator
from weft.proving.recorded_run import ExecutorCall, RecordedRun, call_executor, cast_state
from weft.torch_private import use_determinism
from weft.training.build import FOR_INFERENCE, TOLERANCES, build_splits, build_task, check_recipe
from weft.training.component import Component
from weft.training.datasets import Splits
from weft.training.recipe import Recipe

__all__ = ["DRIFT", "ExecutorProof", "prove_executors", "tolerance_of"]

DRIFT = 100
"""How many times the tolerance of one step the losses and parameters of several may differ."""

FLOOR = 1e-3
"""A gradient is held against its largest value, or this share of the step's largest gradient where that is more: one
that should be nothing is all rounding."""


@dataclass(frozen=True)
class ExecutorProof:
    """The finding of a comparison. Errors are relative to their tensor's largest value; a tolerance of 0 is bitwise."""

    passed: bool
    is_bitwise: bool
    num_steps: int
    largest_error: float  # of one step
    tolerance: float
    finding: str  # in words: what was shown, or the first difference and where it is
    operator: Difference | None = None  # the first that differs


@dataclass(frozen=True)
class _Comparison:
    """One tensor of both, in the words in which its difference is told."""

    what: str
    error: float
    limit: float
    piece: ExecutorCall  # the reference's, from which the difference can be computed again


@dataclass(frozen=True)
class _Setting:
    """Both sides of a comparison and their data: the recipe with the one executor and with the other, subject first."""

    recipes: tuple[Recipe, Recipe]
    splits: Splits
    seed: int
    limit: float


def prove_executors(
    recipe: Recipe, subject: str, reference: str, *, seed: int = 0, num_steps: int = 5, tolerance: float | None = None
) -> ExecutorProof:
    """Train some steps of the recipe with both executors, and compare; name the first operator that differs.

    An executor that cannot train is compared by what it evaluates, on the batches and states of an eager training.

    Args:
        tolerance: by default that of the pair (see `tolerance_of`).
    """
    limit = tolerance_of(subject, reference) if tolerance is None else tolerance
    is_training = not FOR_INFERENCE & {subject, reference}
    recipes = _with_executor(recipe, subject, is_training), _with_executor(recipe, reference, is_training)
    largest = 0.0
    with use_determinism(), torch.random.fork_rng(devices=[]):
        setting = _Setting(recipes, build_splits(recipe), seed, limit)
        for step, compared in (_train if is_training else _evaluate)(setting, num_steps):
            if not compared.error <= compared.limit:
                found = blame_operator(recipes, setting.splits, compared.piece, limit, is_training=is_training)
                return _failed(compared, step, num_steps, limit, (subject, reference), found)
            if compared.limit <= limit:
                largest = max(largest, compared.error)
    how = "to the last bit" if largest == 0 else f"a step to {largest:.2g} of each tensor's largest value"
    what = "losses, gradients and parameters" if is_training else "losses and predictions"
    finding = f"{subject} gave the {what} of {reference} at each of {num_steps} steps, {how}"
    return ExecutorProof(True, largest == 0, num_steps, largest, limit, finding)


def _train(setting: _Setting, num_steps: int) -> Iterator[tuple[int, _Comparison]]:
    splits, seed, limit = setting.splits, setting.seed, setting.limit
    subject, reference = (RecordedRun(recipe, splits, seed) for recipe in setting.recipes)
    trained = [subject]
    if subject.is_in_one:
        trained.append(RecordedRun(setting.recipes[0], splits, seed, is_recorded=False))
    # Stepped from the reference's states, so it must not be the one that trains on its own.
    probe = build_task(setting.recipes[0], splits, seed)[0].executor if limit > 0 else None
    for step in range(num_steps):
        found, expected = subject.take_step(), reference.take_step()
        if probe is not None:
            found = [call_executor(probe, piece.model, piece.batch) for piece in expected]
        for run in trained[1:]:
            run.take_step()
        yield from ((step, compared) for compared in _of_one_step(found, expected, limit))
        for run in trained:
            yield from ((step, compared) for compared in _of_all_steps(run, reference, expected[-1], limit))


def _evaluate(setting: _Setting, num_steps: int) -> Iterator[tuple[int, _Comparison]]:
    run = RecordedRun(_with_executor(setting.recipes[0], "eager"), setting.splits, setting.seed)
    executors = [build_task(recipe, setting.splits, setting.seed)[0].executor for recipe in setting.recipes]
    for step in range(num_steps):
        batch = run.take_step()[-1].batch
        piece = ExecutorCall(cast_state(run.state.model, run.state.model), batch)
        found, expected = (e.infer(cast_state(piece.model, e.initial_state()), batch) for e in executors)
        for name in ("loss", "predictions"):
            error, place = relative_error(getattr(found, name), getattr(expected, name))
            yield step, _Comparison(f"{name}{place}", error, setting.limit, piece)


def tolerance_of(*executors: str) -> float:
    """The tolerance for a pair of executors: the widest of the tolerances that each states against eager mode.

    >>> tolerance_of("graph", "eager")
    0.0
    """
    return max(TOLERANCES.get(name, 0.0) for name in executors)


def _with_executor(recipe: Recipe, name: str, is_training: bool = True) -> Recipe:
    """The recipe with an executor; the options of the recipe's own are kept where it is the one."""
    if recipe.mutable.plan.num_ranks > 1:
        raise UsageError(f"executors are compared on one rank (plan: {recipe.mutable.plan}); leave the plan out")
    own = recipe.mutable.executor
    chosen = replace(recipe, mutable=replace(recipe.mutable, executor=own if own.name == name else Component(name)))
    check_recipe(chosen, is_training=is_training)
    return chosen


def _of_one_step(
    found: Sequence[ExecutorCall], expected: Sequence[ExecutorCall], limit: float
) -> Iterator[_Comparison]:
    assert len(found) == len(expected)
    for own, other in zip(found, expected, strict=True):
        for name, tensor in other.results.items():
            error, place = _error(own.results[name], tensor, limit)
            yield _Comparison(f"{name}{place}", error, limit, other)
        sizes = [float(g.abs().max()) for g in other.gradients.values() if g is not None and g.numel()]
        floor = FLOOR * max(sizes, default=0.0) if limit > 0 else 0.0
        for name in {**other.gradients, **own.gradients}:
            mine, theirs = own.gradients.get(name), other.gradients.get(name)
            if mine is None or theirs is None:
                error, place = (0.0 if mine is theirs else float("inf")), ""
            else:
                error, place = _error(mine, theirs, limit, floor)
            yield _Comparison(f"gradient {name}{place}", error, limit, other)


def _of_all_steps(run: RecordedRun, reference: RecordedRun, last: ExecutorCall, limit: float) -> Iterator[_Comparison]:
    mine = run.tensors()
    if limit == 0:
        for name, tensor in reference.tensors().items():
            error, place = _error(mine[name], tensor, limit)
            yield _Comparison(f"parameter {name}{place}", error, limit, last)
        return
    error = abs(run.last_loss - reference.last_loss) / abs(reference.last_loss)
    yield _Comparison("loss of a training of its own", error, DRIFT * limit, last)
    error = _distance(run.state.model, reference.state.model)
    yield _Comparison("vector of all parameters of a training of its own", error, DRIFT * limit, last)


def _error(found: Tensor, expected: Tensor, limit: float, floor: float = 0.0) -> tuple[float, str]:
    """Where every bit counts, so does the type."""
    if limit == 0 and found.dtype != expected.dtype:
        return float("inf"), ""
    return relative_error(found, expected, floor)


def _distance(found: State, expected: State) -> float:
    """Of all parameters as one vector, relative to its length."""
    pairs = [(found.parameters[name].detach().double(), p.detach().double()) for name, p in expected.parameters.items()]
    apart = sum(float((a - b).square().sum()) for a, b in pairs)
    length = sum(float(b.square().sum()) for _, b in pairs)
    return float((apart / length) ** 0.5) if length else apart**0.5


def _failed(
    compared: _Comparison, step: int, num_steps: int, limit: float, names: tuple[str, str], blamed: Difference | None
) -> ExecutorProof:
    finding = f"at step {step + 1}, {compared.what} of {names[0]} is off from {names[1]} by {compared.error:.3g} of "
    finding += f"its largest value (allowed: {compared.limit:.3g}); "
    if blamed is not None:
        finding += f"first operator that differs: {blamed}"
    else:
        finding += "each operator alone agrees: the difference comes of how they are put together"
    return ExecutorProof(False, False, num_steps, compared.error, limit, finding, blamed)
