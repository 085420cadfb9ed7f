"""Asynchronous against synchronous training as workers grow (Chen et al. 2016: asynchrony costs accuracy, and more so).

    python -m examples.papers.async_against_sync [--ranks 16,64,128] [--seeds 3] [--out docs/papers]

Every worker takes 4 samples a step, and all trainings take as many samples. Three lines:

    synchronous            one update of all gradients of a step; the learning rate grows with the root of the batch
    asynchronous           an update of every gradient, with a learning rate that suits 16 workers; about N - 1 others
                           come between the weights that a gradient is of and its update
    asynchronous, damped   the learning rate of the synchronous run, divided by that number (Zhang et al. 2016)
"""

import math
from collections.abc import Sequence

from examples.papers.chart import Panel
from examples.papers.experiment import Case, Options, Row, parse_options, run_cases, series_of, write_results

__all__ = ["main"]

SYNCHRONOUS, PLAIN, DAMPED = "synchronous", "asynchronous", "asynchronous, damped"
SAMPLES_A_WORKER = 4


def cases_of(options: Options) -> list[Case]:
    """The lines one after the other, each over all numbers of workers."""
    lines = {
        # On servers and without backup workers: to the last bit what `topology=direct` gives, and simulated sooner.
        SYNCHRONOUS: ("backup(0)", _synchronous_lr),
        PLAIN: ("async(full)", lambda _ranks: 1e-3),
        DAMPED: ("async(staleness)", _synchronous_lr),
    }
    return [
        Case(
            name=name,
            x=str(ranks),
            plan=f"data={ranks} consistency={scheme} topology=server",
            settings=_settings(ranks, lr(ranks), options.epochs),
        )
        for name, (scheme, lr) in lines.items()
        for ranks in options.ranks
    ]


def _synchronous_lr(num_ranks: int) -> float:
    return 4e-3 * math.sqrt(num_ranks / 16)


def _settings(num_ranks: int, lr: float, epochs: float) -> tuple[str, ...]:
    return (
        f"batch_size={SAMPLES_A_WORKER * num_ranks}",
        "optimizer=adam",
        f"optimizer.lr={lr:.6g}",
        "schedule=constant",
        f"epochs={epochs:g}",
        f"evaluate_every={epochs:g}",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(__doc__ or "", arguments, ranks="16,64,128", values="", seeds=3, epochs=10)
    rows = run_cases(cases_of(options), options.num_seeds)
    x, ticks = "workers", tuple(str(ranks) for ranks in options.ranks)
    title = f"after {options.epochs:g} epochs"
    panels = [
        Panel(f"test accuracy {title} (%)", x, ticks, series_of(rows, "test/accuracy", 100), from_zero=False),
        Panel(f"virtual seconds {title}", x, ticks, series_of(rows, "wall_clock")),
    ]
    write_results("async_against_sync", "Asynchronous against synchronous", options, rows, panels, finding_of(rows))


def finding_of(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """By how much asynchronous training is less accurate, for each number of workers."""
    middles = {(row.case.name, row.case.x): row.middle("test/accuracy") for row in rows}
    return {
        f"accuracy_lost_{name.replace(', ', '_')}": {
            x: middles[SYNCHRONOUS, x] - accuracy for (line, x), accuracy in middles.items() if line == name
        }
        for name in (PLAIN, DAMPED)
    }


if __name__ == "__main__":
    main()
