"""The seconds of a step in `arrivals.txt`, from a law that is fixed before anything is trained.

    python -m examples.papers.arrivals      writes the file again

Chen et al. (2016) trained on 100 machines: 80% of the gradients came within 2 s, 98% within 4 s, the slowest after
310 s. The law goes through the first two points, and has a long tail:

    seconds   1 ........ 2 ........ 4 .................... 25
    share     0         0.8        0.98                 0.9995
              as the exponent grows evenly    P(more than t) = 0.02 (4 / t)^2

That the fastest takes 1 s is our choice, and so is the exponent of the tail: with it one step in 300,000 takes 310 s.
The file holds the middles of 1000 equal shares of the law, so no random numbers are in it.
"""

from pathlib import Path
from statistics import median

from weft.atomic import write_text

__all__ = ["ARRIVALS", "median_step", "quantile"]

ARRIVALS = Path(__file__).with_name("arrivals.txt")
NUM_LINES = 1000


def quantile(share: float) -> float:
    """The seconds within which this share of the gradients has come.

    >>> [round(quantile(share), 3) for share in (0.0, 0.8, 0.98, 0.995)]
    [1.0, 2.0, 4.0, 8.0]
    """
    if share < 0.8:
        return float(2.0 ** (share / 0.8))
    if share < 0.98:
        return float(2.0 ** (1 + (share - 0.8) / 0.18))
    return float(4.0 * (0.02 / (1 - share)) ** 0.5)


def lines() -> str:
    """The content of the file."""
    head = "# Seconds of a step, a line each; made by python -m examples.papers.arrivals, which tells the law.\n"
    return head + "".join(f"{quantile((line + 0.5) / NUM_LINES):.4f}\n" for line in range(NUM_LINES))


def median_step() -> float:
    """Seconds. Steps of this length, slowed down by what is in the file over its median, are those of the file."""
    text = ARRIVALS.read_text(encoding="utf-8")
    return median(float(line) for line in text.splitlines() if not line.startswith("#"))


if __name__ == "__main__":
    write_text(ARRIVALS, lines())
