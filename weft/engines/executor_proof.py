"""Proof that two executors compute the same: the same batches; losses, gradients and parameters compared every step.

    bitwise pair      A and B each train on their own; everything must be equal to the last bit
    pair to a tolerance
        one step      A also computes each step from B's state: loss, gradients, statistics within the tolerance
        all steps     A on its own: losses and parameters, taken as one vector, within a hundred times the tolerance

Only from one state can gradients be held to a tight tolerance: an optimizer that divides by a gradient's size, as Adam
does, makes a whole step of what is rounding in a gradient that should be nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from weft.engines.executor_blame import blame_operator
from weft.engines.recorded_run import Piece, RecordedRun, compute_piece
from weft.errors import UsageError
from weft.graph import Difference, State, relative_error
from weft.torch_private import use_determinism
from weft.training.build import TOLERANCES, build_splits, build_task, check_recipe
from weft.training.component import Component
from weft.training.recipe import Recipe

__all__ = ["DRIFT", "ExecutorProof", "prove_executors", "tolerance_of"]

DRIFT = 100
"""How many times the tolerance of one step the losses and parameters of several may differ."""

FLOOR = 1e-3
"""A gradient is held against its largest value, or this share of the step's largest gradient where that is more: one
that should be nothing is all rounding."""


@dataclass(frozen=True)
class ExecutorProof:
    """What a comparison found. Errors are relative to their tensor's largest value; a tolerance of 0 is bitwise."""

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
    piece: Piece  # the reference's, from which the difference can be computed again


def prove_executors(
    recipe: Recipe, subject: str, reference: str, *, seed: int = 0, num_steps: int = 5, tolerance: float | None = None
) -> ExecutorProof:
    """Train some steps of the recipe with both executors, and compare; name the first operator that differs.

    Args:
        tolerance: by default that of the pair (see `tolerance_of`).
    """
    limit = tolerance_of(subject, reference) if tolerance is None else tolerance
    chosen = [_with_executor(recipe, name) for name in (subject, reference)]
    largest = 0.0
    with use_determinism(), torch.random.fork_rng(devices=[]):
        splits = build_splits(recipe)
        runs = [RecordedRun(one, splits, seed) for one in chosen]
        # Stepped from the reference's states, so it must not be the one that trains on its own.
        probe = build_task(chosen[0], splits, seed)[0].executor if limit > 0 else None
        for step in range(num_steps):
            found, expected = (run.take_step() for run in runs)
            if probe is not None:
                found = [compute_piece(probe, piece.model, piece.batch) for piece in expected]
            for compared in (*_of_one_step(found, expected, limit), *_of_all_steps(runs, expected, limit)):
                if not compared.error <= compared.limit:
                    blamed = blame_operator(runs, splits, compared.piece, limit)
                    return _failed(compared, step, num_steps, limit, (subject, reference), blamed)
                if compared.limit <= limit:
                    largest = max(largest, compared.error)
    how = "to the last bit" if largest == 0 else f"a step to {largest:.2g} of each tensor's largest value"
    finding = f"{subject} gave the losses, gradients and parameters of {reference} at each of {num_steps} steps, {how}"
    return ExecutorProof(True, largest == 0, num_steps, largest, limit, finding)


def tolerance_of(*executors: str) -> float:
    """What executors are held to: the widest of the tolerances that each states against eager mode.

    >>> tolerance_of("graph", "eager")
    0.0
    """
    return max(TOLERANCES.get(name, 0.0) for name in executors)


def _with_executor(recipe: Recipe, name: str) -> Recipe:
    """The recipe with an executor; the options of the recipe's own are kept where it is the one."""
    if recipe.mutable.plan != "data=1":
        raise UsageError(f"executors are compared on one rank (plan: {recipe.mutable.plan}); leave the plan out")
    own = recipe.mutable.executor
    chosen = replace(recipe, mutable=replace(recipe.mutable, executor=own if own.name == name else Component(name)))
    check_recipe(chosen)
    return chosen


def _of_one_step(found: Sequence[Piece], expected: Sequence[Piece], limit: float) -> Iterator[_Comparison]:
    assert len(found) == len(expected)
    for own, other in zip(found, expected, strict=True):
        for name, tensor in other.results.items():
            error, place = relative_error(own.results[name], tensor)
            yield _Comparison(f"{name}{place}", error, limit, other)
        sizes = [float(g.abs().max()) for g in other.gradients.values() if g is not None and g.numel()]
        floor = FLOOR * max(sizes, default=0.0) if limit > 0 else 0.0
        for name in {**other.gradients, **own.gradients}:
            mine, theirs = own.gradients.get(name), other.gradients.get(name)
            if mine is None or theirs is None:
                error, place = (0.0 if mine is theirs else float("inf")), ""
            else:
                error, place = relative_error(mine, theirs, floor)
            yield _Comparison(f"gradient {name}{place}", error, limit, other)


def _of_all_steps(runs: Sequence[RecordedRun], expected: Sequence[Piece], limit: float) -> Iterator[_Comparison]:
    mine, theirs = (run.tensors() for run in runs)
    if limit == 0:
        for name, tensor in theirs.items():
            error, place = relative_error(mine[name], tensor)
            yield _Comparison(f"parameter {name}{place}", error, limit, expected[-1])
        return
    losses = [run.last_loss for run in runs]
    error = abs(losses[0] - losses[1]) / abs(losses[1])
    yield _Comparison("loss of a training of its own", error, DRIFT * limit, expected[-1])
    error = _distance(*(run.state.model for run in runs))
    yield _Comparison("vector of all parameters of a training of its own", error, DRIFT * limit, expected[-1])


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
