"""Local SGD: what H, the steps between two meetings, saves in bytes and costs in samples (Stich 2019).

    python -m examples.papers.local_steps [--ranks 16] [--seeds 3] [--out docs/papers]

Each rank updates its own weights, and every H steps they become their mean. The network is slow: a link carries the
weights once in the time of two median steps. `digits_mlp` stands for a model whose exchange costs as much as its
computation.
"""

from collections.abc import Sequence

from examples.papers.arrivals import median_step
from examples.papers.chart import Panel
from examples.papers.experiment import fastest_of, parse_options, series_of, sweep, to_target, write_results
from weft.planning.cluster import Link
from weft.planning.network import NetworkModel

__all__ = ["main"]

WEIGHTS = 68_904
"""Bytes of the parameters of `digits_mlp`."""
SLOW_NETWORK = NetworkModel(between=Link(alpha=1e-3, beta=2 * median_step() / WEIGHTS))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(__doc__ or "", arguments, ranks="16", values="1,2,4,8,16,32,64", seeds=3, epochs=40)
    num_ranks = options.ranks[0]
    settings = to_target(batch_size=4 * num_ranks, lr=0.3, epochs=options.epochs)
    rows = sweep(options, "local({value})", settings, SLOW_NETWORK)
    x, ticks = "H, steps between meetings", options.values
    panels = [
        Panel("MB handed to the network to 93% accuracy", x, ticks, series_of(rows, "bytes_to_target", 1e-6)),
        Panel("samples to 93% accuracy", x, ticks, series_of(rows, "samples_to_target")),
        Panel("virtual seconds to 93% accuracy", x, ticks, series_of(rows, "time_to_target")),
    ]
    finding = {
        **fastest_of(rows, "steps"),
        "bytes_to_target": {row.case.x: row.middle("bytes_to_target") for row in rows},
        "samples_to_target": {row.case.x: row.middle("samples_to_target") for row in rows},
    }
    write_results("local_steps", "Local SGD", options, rows, panels, finding)


if __name__ == "__main__":
    main()
