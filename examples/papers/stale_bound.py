"""Stale-synchronous training: what a larger bound saves in waiting, and costs in samples (Ho et al. 2013).

    python -m examples.papers.stale_bound [--ranks 16] [--seeds 3] [--out docs/papers]

A rank may run up to s steps ahead of the slowest. Updates are committed by clock: bound 0 is the synchronous run to the
last bit, and with bound s a gradient is of weights that are up to s updates old.
"""

from collections.abc import Sequence

from examples.papers.chart import Panel
from examples.papers.experiment import fastest_of, parse_options, series_of, sweep, to_target, write_results

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(__doc__ or "", arguments, ranks="16", values="0,1,2,3,4,5,6", seeds=3, epochs=40)
    num_ranks = options.ranks[0]
    settings = to_target(batch_size=8 * num_ranks, lr=0.15, epochs=options.epochs)
    rows = sweep(options, "stale({value}) topology=server", settings)
    x, ticks = "bound s", options.values
    panels = [
        Panel("share of time waited (%)", x, ticks, series_of(rows, "idle_share", 100)),
        Panel("samples to 93% accuracy", x, ticks, series_of(rows, "samples_to_target")),
        Panel("virtual seconds to 93% accuracy", x, ticks, series_of(rows, "time_to_target")),
    ]
    finding = {
        **fastest_of(rows, "bound"),
        "share_waited": {row.case.x: row.middle("idle_share") for row in rows},
    }
    write_results("stale_bound", "Stale-synchronous training", options, rows, panels, finding)


if __name__ == "__main__":
    main()
