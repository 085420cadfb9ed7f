"""Backup workers: time to the target against b (Chen et al. 2016: the best b is neither none nor many).

    python -m examples.papers.backup_workers [--ranks 32] [--seeds 3] [--out docs/papers]

There are N workers in all; a step takes the first N - b gradients and drops the others. A larger b waits less, and
takes fewer samples a step. Chen et al. had N + b = 100 and found 96 + 4 best.
"""

from collections.abc import Sequence

from examples.papers.chart import Panel
from examples.papers.experiment import fastest_of, parse_options, series_of, sweep, to_target, write_results

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(__doc__ or "", arguments, ranks="32", values="0,1,2,4,8,12,16,20,24,28", seeds=3, epochs=40)
    num_ranks = options.ranks[0]
    settings = to_target(batch_size=4 * num_ranks, lr=0.3, epochs=options.epochs)
    rows = sweep(options, "backup({value}) topology=server", settings)
    x, ticks = f"b, of {num_ranks} workers", options.values
    panels = [
        Panel("virtual seconds to 93% accuracy", x, ticks, series_of(rows, "time_to_target")),
        Panel("samples handed out until then", x, ticks, series_of(rows, "samples_to_target")),
        Panel("share of time waited (%)", x, ticks, series_of(rows, "idle_share", 100)),
    ]
    finding = fastest_of(rows, "b")
    write_results("backup_workers", "Backup workers", options, rows, panels, finding)


if __name__ == "__main__":
    main()
