"""`prove_script`: a script's first steps in one process and on ranks; of a difference, the cause, by experiment.

    as it is                 one process          N ranks             compared
    no random numbers        one process          N ranks             where the models draw some
    batch_norm="global"                           N ranks             where there is one
    loss="sum", weight=...                        N ranks             where the gradients of the first backward say so

A change that makes the difference vanish is its cause. One that does not stays while the next is tried, since a script
may have several.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from weft.distributed.script.observation.tracing import TraceRequest
from weft.errors import PlanError, UsageError
from weft.proving.compressed_sums import is_lossy
from weft.proving.proof import Proof
from weft.proving.rounding import rounding_of
from weft.proving.script_causes import (
    BATCH_NORM,
    EQUAL_RANDOM,
    SUMMED,
    Cause,
    are_weights,
    draws_equally,
    find_counts,
    find_unshared,
    fit_weights,
    is_mean,
    is_sum,
    tokens,
)
from weft.proving.script_trace import ScriptTrace, compare_script, read_script_traces
from weft.specs import Plan, parse_plan_for

__all__ = ["Run", "ScriptProof", "check_provable", "prove_script"]

Run = Callable[[TraceRequest, int], None]
"""Runs the script on so many ranks, traced as is asked for, to its end; 1 is one process, without any plan."""


@dataclass(frozen=True)
class ScriptProof:
    """The finding of a comparison, and the causes of a difference that fit. `largest_error` is relative to the largest
    value of its tensor."""

    passed: bool
    is_bitwise: bool
    num_steps: int
    largest_error: float
    tolerance: float
    finding: str
    causes: tuple[Cause, ...] = ()


def check_provable(plan: Plan) -> None:
    """Refuse a plan whose ranks differ from one process, and from each other, by design."""
    if not plan.is_synchronous:
        raise PlanError(
            f"ranks of this plan have parameters of their own, which no single process has (plan: {plan}); "
            "prove a synchronous plan, or a recipe with this one, whose equations are known"
        )
    if is_lossy(plan):
        raise PlanError(
            f"a compression that draws, or keeps numbers back, gives other parameters than one process has "
            f"(plan: {plan}); prove the script without it, and a recipe with it, whose equations are known"
        )


def prove_script(
    run: Run, num_ranks: int, *, num_steps: int = 5, seed: int = 0, tolerance: float = 1e-4
) -> ScriptProof:
    """Show that a script computes on ranks what it computes in one process, or why not.

    Args:
        run: runs the script.
        num_steps: updates to compare.
        seed: of all generators when the script begins.
        tolerance: the largest error, as a share of a tensor's largest value.

    Raises:
        UsageError: the script never wove anything, or took no step.
        PlanError: its plan is not synchronous.
    """
    with tempfile.TemporaryDirectory(prefix="weft-proof-") as folder:
        return _Laboratory(run, num_ranks, Path(folder), TraceRequest(Path(folder), num_steps, seed), tolerance).prove()


@final
class _Laboratory:
    """The script as it is, and with one thing changed after the other."""

    def __init__(self, run: Run, num_ranks: int, folder: Path, asked: TraceRequest, tolerance: float) -> None:
        self._run = run
        self._num_ranks = num_ranks
        self._folder = folder
        self._asked = asked
        self._tolerance = tolerance
        self._num_runs = 0
        self._has_gradients = True

    def prove(self) -> ScriptProof:
        reference = self._trace_one()
        ranks = self._trace(self._num_ranks)
        self._look_at_plan(ranks)
        found = self._compare(ranks, reference)
        unshared = find_unshared(ranks, reference)
        if unshared is not None:
            return _judged(replace(found, passed=False), (unshared,))
        if found.passed:
            return _judged(found)
        draws = any(any(trace.facts.draws) for trace in (reference, *ranks))
        changes: dict[str, Any] = {}
        if draws:
            changes["no_randomness"] = True
            is_equal = draws_equally(ranks)
            reference, ranks = self._trace_one(**changes), self._trace(self._num_ranks, **changes)
            without = self._compare(ranks, reference)
            if without.passed:
                return _judge_random(found, without, is_equal=is_equal)
        return _judged(found, self._find_causes(ranks, reference, changes))

    def _find_causes(
        self, ranks: Sequence[ScriptTrace], reference: ScriptTrace, changes: dict[str, Any]
    ) -> tuple[Cause, ...]:
        """Those which, taken away together, leave no difference; random numbers are out of the way already."""
        alone, is_explained = self._find_weights(ranks, reference, changes)
        if is_explained or not any(trace.facts.has_batch_norm for trace in ranks):
            return alone
        own = {**changes, "batch_norm": "global"}
        with_all = self._trace(self._num_ranks, **own)
        if self._compare(with_all, reference).passed:
            return (BATCH_NORM,)
        # Ranks that normalise together have gradients in each other's losses, and weights cannot be fitted to a sum.
        if self._compare(self._trace(self._num_ranks, **own, loss="sum"), reference).passed:
            return (BATCH_NORM, SUMMED)
        weighed, _ = self._find_weights(with_all, reference, own)
        return (BATCH_NORM, *weighed) if weighed else ()

    def _find_weights(
        self, ranks: Sequence[ScriptTrace], reference: ScriptTrace, changes: dict[str, Any]
    ) -> tuple[tuple[Cause, ...], bool]:
        """How the loss weighs its samples, by the first gradients; and whether an experiment has confirmed it."""
        weights, left = fit_weights([trace.first for trace in ranks], reference.first)
        if is_sum(weights, left):
            agrees = self._compare(self._trace(self._num_ranks, **changes, loss="sum"), reference).passed
            return ((SUMMED,) if agrees else ()), agrees
        if not is_mean(weights, left) or are_weights(ranks, weights):
            return (), False
        counted = find_counts(ranks, weights)
        if counted is None:
            return (tokens(None, weights),), False
        agrees = self._compare(self._trace(self._num_ranks, **changes, counted=counted), reference).passed
        return (tokens(counted if agrees else None, weights),), agrees

    def _trace_one(self, **changes: Any) -> ScriptTrace:
        (reference,) = self._trace(1, **changes)
        if not reference.facts.num_woven:
            raise UsageError("script never wove a model, so nothing of it can be traced; call weft.weave in it")
        if not reference.num_steps:
            raise UsageError("script took no step of a woven optimizer; give it to weave, and call its step()")
        return reference

    def _trace(self, num_ranks: int, **changes: Any) -> list[ScriptTrace]:
        self._num_runs += 1
        folder = self._folder / f"run-{self._num_runs}"
        folder.mkdir()
        self._run(replace(self._asked, folder=folder, **changes), num_ranks)
        return read_script_traces(folder, num_ranks)

    def _compare(self, ranks: Sequence[ScriptTrace], reference: ScriptTrace) -> Proof:
        return compare_script(ranks, reference, self._tolerance, has_gradients=self._has_gradients)

    def _look_at_plan(self, ranks: Sequence[ScriptTrace]) -> None:
        """Of ranks at servers, gradients are their own; those that are rounded on the way have more tolerance."""
        for text in {trace.facts.plan for trace in ranks}:
            plan = parse_plan_for(text, self._num_ranks)
            check_provable(plan)
            self._has_gradients = self._has_gradients and plan.channel == "all_reduce"
            digits = rounding_of(plan).digits
            if digits is not None:
                self._tolerance = max(self._tolerance, 4 * self._num_ranks * 2.0**-digits)


def _judge_random(found: Proof, without: Proof, *, is_equal: bool) -> ScriptProof:
    """Masks and noise of ranks are other than one process's, and that is right, unless all ranks have the same."""
    if is_equal:
        return _judged(found, (EQUAL_RANDOM,))
    finding = (
        f"{without.finding}, without random numbers; with them (dropout, noise) every rank draws its own, as it "
        f"should, and {found.finding}"
    )
    return _judged(replace(without, finding=finding))


def _judged(found: Proof, causes: tuple[Cause, ...] = ()) -> ScriptProof:
    return ScriptProof(
        found.passed, found.is_bitwise, found.num_steps, found.largest_error, found.tolerance, found.finding, causes
    )
