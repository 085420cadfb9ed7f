"""Backup workers: time to the target against b (Chen et al. 2016: the best b is neither none nor many).

    python -m examples.papers.backup_workers [--ranks 32] [--seeds 3] [--out docs/papers]

There are N workers in all; a step takes the first N - b gradients and drops the others. A larger b waits less, and
takes fewer samples a step. Chen et al. had N + b = 100 and found 96 + 4 best.
"""

from collections.abc import Sequence

from examples.papers.chart import Panel
from examples.papers.experiment import Case, parse_options, run_cases, series_of, to_target, write_results

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(__doc__ or "", arguments, ranks="32", values="0,1,2,4,8,12,16,20,24,28", seeds=3, epochs=40)
    num_ranks = options.ranks[0]
    settings = to_target(batch_size=4 * num_ranks, lr=0.3, epochs=options.epochs)
    cases = [
        Case(f"{num_ranks} workers", b, f"data={num_ranks} consistency=backup({b}) topology=server", settings)
        for b in options.values
    ]
    rows = run_cases(cases, options.num_seeds)
    best = min(rows, key=lambda row: row.middle("time_to_target"))
    x, ticks = f"b, of {num_ranks} workers", options.values
    panels = [
        Panel("virtual seconds to 93% accuracy", x, ticks, series_of(rows, "time_to_target")),
        Panel("samples handed out until then", x, ticks, series_of(rows, "samples_to_target")),
        Panel("share of time waited (%)", x, ticks, series_of(rows, "idle_share", 100)),
    ]
    finding = {
        "best_b": best.case.x,
        "seconds_to_target_at_best_b": best.middle("time_to_target"),
        "seconds_to_target_at_first_b": rows[0].middle("time_to_target"),
    }
    write_results("backup_workers", "Backup workers", options, rows, panels, finding)


if __name__ == "__main__":
    main()
