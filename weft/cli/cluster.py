"""`weft cluster probe`: measure what a message costs, and write it down."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.options import Json

if TYPE_CHECKING:
    from weft.simulation.probing import Chosen, ClusterProbe

__all__ = ["cluster", "probe"]

SIZES = (8, 1024, 16_384, 131_072, 1_048_576, 16_777_216, 134_217_728)
NUMS_RANKS = (2, 8, 64)

cluster = typer.Typer(no_args_is_help=True, help="Measure the cluster at hand.")


@cluster.callback()
def _keep_sub_commands() -> None:
    """Measure the cluster at hand."""


@cluster.command("probe")
def probe(
    workers: Annotated[
        int, typer.Option(min=2, metavar="N", help="Ranks to start, unless torchrun or mpirun did.")
    ] = 2,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the cluster.")] = Path("cluster.toml"),
    json: Json = False,
) -> None:
    """Fit alpha and beta inside the host and over sockets, and tell which all-reduce they make the fastest."""
    from weft.cli.output import print_json
    from weft.planning.cluster import write_cluster
    from weft.simulation.probing import probe_cluster, table_of_choices

    found = probe_cluster(workers)
    if found is None:  # another rank tells the result
        return
    write_cluster(out, found.cluster)
    choices = table_of_choices(found.cluster, NUMS_RANKS, SIZES)
    if json:
        print_json({"path": str(out), "probe": found, "choices": choices})
    else:
        _print_tables(found, choices)
        print(f"cluster file: {out}")


def _print_tables(found: "ClusterProbe", choices: "list[Chosen]") -> None:
    from weft.cli.output import print_tables
    from weft.report.quantity import format_quantity
    from weft.report.table import aligned, section

    def rate(seconds_per_byte: float) -> str:
        return f"{format_quantity(1 / seconds_per_byte, 'B')}/s" if seconds_per_byte else "no limit seen"

    fits = {"inside a host": found.inside, "over sockets": found.between}
    rows = [(n, format_quantity(f.alpha, "s"), rate(f.beta), f"{f.worst_error:.0%}") for n, f in fits.items()]
    print_tables(section("messages", aligned("lrrr", rows, ("link", "a message", "then", "largest residual"))))
    by_size = {size: [c for c in choices if c.num_bytes == size] for size in SIZES}
    cells = [
        (format_quantity(size, "B"), *(f"{c.algorithm} {format_quantity(c.seconds, 's')}" for c in row))
        for size, row in by_size.items()
    ]
    headers = ("message", *(f"{num_ranks} ranks" for num_ranks in NUMS_RANKS))
    print_tables(section("the fastest all-reduce, and what it is expected to take", aligned("rlll", cells, headers)))
