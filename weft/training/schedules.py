"""Schedules: the factor on the learning rate, as a pure function of the samples seen so far.

Samples, not steps: the curve over the data stays the same when the batch size or the number of ranks changes. A
factory takes the budget and the size of an epoch, both in samples, and its options in epochs.

    1             ___________
                 /           |
    warmup_from /            |__________
                0   warm-up  milestone   -> samples

A warm-up climbs in a straight line to 1, where the schedule takes over. Milestones count from the first sample, warm-up
included; decays start when the warm-up ends.
"""

import math
from collections.abc import Callable, Mapping

from weft.errors import RecipeError

__all__ = ["SCHEDULES", "Schedule"]

Schedule = Callable[[int], float]
"""The factor for a step that starts when so many samples have been seen: 0 for the first."""


def constant(
    total_samples: int, samples_per_epoch: int, *, warmup_epochs: float = 0.0, warmup_from: float = 0.1
) -> Schedule:
    """1 throughout.

    >>> constant(1000, 100)(0)
    1.0
    """
    warmup = _warmup_samples(total_samples, samples_per_epoch, warmup_epochs)
    return _after_warmup(warmup, warmup_from, lambda samples: 1.0)


def step(
    total_samples: int,
    samples_per_epoch: int,
    *,
    gamma: float = 0.1,
    milestones: tuple[float, ...] = (),
    every: float | None = None,
    warmup_epochs: float = 0.0,
    warmup_from: float = 0.1,
) -> Schedule:
    """Times gamma at each milestone, or at every multiple of `every`; both in epochs from the start of training.

    >>> halving = step(1000, 100, gamma=0.5, milestones=(5, 7.5))
    >>> halving(499), halving(500), halving(750)
    (1.0, 0.5, 0.25)
    """
    warmup = _warmup_samples(total_samples, samples_per_epoch, warmup_epochs)
    _check_gamma(gamma)
    if (every is None) == (not milestones):
        numbers = f"milestones: {milestones}, every: {every}"
        raise RecipeError(f"step needs milestones or every, not both ({numbers}); --set schedule.every=30")
    if every is not None and round(every * samples_per_epoch) < 1:
        raise RecipeError(f"step would drop at every sample (every: {every}); --set schedule.every=30")
    drops = [round(epoch * samples_per_epoch) for epoch in (milestones if every is None else (every,))]
    _check_drops(drops, warmup, total_samples)

    def factor(samples: int) -> float:
        num_drops = sum(samples >= drop for drop in drops) if every is None else samples // drops[0]
        return gamma**num_drops

    return _after_warmup(warmup, warmup_from, factor)


def exponential(
    total_samples: int,
    samples_per_epoch: int,
    *,
    gamma: float = 0.95,
    warmup_epochs: float = 0.0,
    warmup_from: float = 0.1,
) -> Schedule:
    """gamma to the power of the epochs, and parts of epochs, since the warm-up.

    >>> exponential(1000, 100, gamma=0.5)(200)
    0.25
    """
    warmup = _warmup_samples(total_samples, samples_per_epoch, warmup_epochs)
    _check_gamma(gamma)
    return _after_warmup(warmup, warmup_from, lambda samples: gamma ** ((samples - warmup) / samples_per_epoch))


def cosine(
    total_samples: int,
    samples_per_epoch: int,
    *,
    final: float = 0.0,
    warmup_epochs: float = 0.0,
    warmup_from: float = 0.1,
) -> Schedule:
    """Half a cosine from 1, at the end of the warm-up, to `final` at the end of training.

    >>> cosine(1000, 100)(500)
    0.5
    """
    warmup = _warmup_samples(total_samples, samples_per_epoch, warmup_epochs)
    if not 0 <= final <= 1:
        raise RecipeError(f"final is not a factor (final: {final}); give 0 <= final <= 1")

    def factor(samples: int) -> float:
        # The last batch may go past the budget.
        share = min(1.0, (samples - warmup) / (total_samples - warmup))
        return final + (1 - final) * (1 + math.cos(math.pi * share)) / 2

    return _after_warmup(warmup, warmup_from, factor)


def _warmup_samples(total_samples: int, samples_per_epoch: int, epochs: float) -> int:
    samples = round(epochs * samples_per_epoch)
    if not 0 <= samples < total_samples:
        numbers = f"warmup_epochs: {epochs:g}, budget: {total_samples / samples_per_epoch:g} epochs"
        raise RecipeError(f"warm-up does not end within the budget ({numbers}); lower warmup_epochs")
    return samples


def _after_warmup(warmup: int, start: float, schedule: Schedule) -> Schedule:
    """A straight line from `start` to 1 over the first `warmup` samples, then the schedule."""
    if not 0 < start <= 1:
        raise RecipeError(f"warmup_from is not a factor (warmup_from: {start}); give 0 < warmup_from <= 1")

    def factor(samples: int) -> float:
        return start + (1 - start) * samples / warmup if samples < warmup else schedule(samples)

    return factor


def _check_gamma(gamma: float) -> None:
    if not 0 < gamma <= 1:
        raise RecipeError(f"gamma is not a decay (gamma: {gamma}); give 0 < gamma <= 1")


def _check_drops(drops: list[int], warmup: int, total_samples: int) -> None:
    """A drop that would never happen, or would happen during the warm-up, is a mistake in the recipe."""
    for drop in drops:
        if drop >= total_samples:
            numbers = f"milestone: sample {drop}, budget: {total_samples} samples"
            raise RecipeError(f"milestone is never reached ({numbers}); lower it or train longer")
        if drop < warmup or drop < 0:
            numbers = f"milestone: sample {drop}, end: sample {warmup}"
            raise RecipeError(f"milestone is before the end of the warm-up ({numbers}); raise it or warm up less")


SCHEDULES: Mapping[str, Callable[..., Schedule]] = {
    "constant": constant,
    "cosine": cosine,
    "exponential": exponential,
    "step": step,
}
