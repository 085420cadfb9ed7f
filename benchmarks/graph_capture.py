"""How long it takes to capture a training step: forward, loss and backward of a model, as one graph.

    python -m benchmarks.graph_capture

`make_fx` of PyTorch records the same step on fake tensors, in turn, where it can be had in seconds. Capture also
resolves writes in place, checks the graph and notes lines of code; make_fx does not. One thread; what a process pays
once, at its first capture, is a row of its own.
"""

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.steps.cases import CASES, loss_of
from weft.atomic import write_json
from weft.graph import capture, training_step
from weft.graph.ir.pytree import flatten, unflatten
from weft.metrics.statistics import summarise
from weft.records.machine import describe_machine, describe_source, describe_versions

__all__ = ["SUBJECTS", "main", "measure", "row_of"]

RESULTS = Path(__file__).parent / "results" / "graph_capture.json"


@dataclass(frozen=True)
class Subject:
    """A model with its loss and a batch, how often it is captured, and whether make_fx takes turns."""

    build: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    make_batch: Callable[[], tuple[Tensor, Tensor]]
    num_runs: int
    has_peer: bool = True


def convolutions(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Conv2d(2, 2, 3, padding=1) for _ in range(count)))


def image() -> tuple[Tensor, Tensor]:
    return torch.randn(1, 2, 8, 8), torch.randn(1, 2, 8, 8)


FIRST = Subject(lambda: convolutions(1), nn.functional.mse_loss, image, 1, has_peer=False)
SUBJECTS: Mapping[str, Subject] = {
    "resnet20": Subject(CASES["resnet20"].make_model, loss_of, lambda: CASES["resnet20"].make_data(32), 7),
    "gpt": Subject(CASES["gpt"].make_model, loss_of, lambda: CASES["gpt"].make_data(32), 7),
    "500 convolutions": Subject(lambda: convolutions(500), nn.functional.mse_loss, image, 7),
    "10000 convolutions": Subject(lambda: convolutions(10_000), nn.functional.mse_loss, image, 2, has_peer=False),
}


def measure(subject: Subject) -> tuple[int, dict[str, list[float]]]:
    """The number of operators, and seconds of each way to capture, run by run."""
    module = subject.build()
    inputs, targets = subject.make_batch()
    state = {"parameters": dict(module.named_parameters()), "buffers": dict(module.named_buffers())}
    batch = {"inputs": (inputs,), "targets": (targets,)}
    step = training_step(module, subject.loss)
    ways: dict[str, Callable[[], Any]] = {"weft": lambda: capture(step, state, batch)}
    if subject.has_peer:
        ways["make_fx"] = lambda: _make_fx(step, state, batch)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    num_operators = 0
    for _ in range(subject.num_runs):
        for way, run in ways.items():
            begin = time.perf_counter()
            made = run()
            seconds[way].append(time.perf_counter() - begin)
            num_operators = len(made.operators) if way == "weft" else num_operators
    return num_operators, seconds


def row_of(model: str, num_operators: int, seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians, and the ratio to make_fx with its interval (95%)."""
    row: dict[str, Any] = {"benchmark": "graph_capture", "model": model, "operators": num_operators}
    own = summarise(seconds["weft"])
    row["weft, s"] = round(own.median, 4)
    row["interval_of_weft"] = [own.interval.low, own.interval.high] if own.interval.is_known else None
    row["ms per operator"] = round(1e3 * own.median / num_operators, 4)
    row["make_fx, s"] = row["make_fx / weft"] = None
    if "make_fx" in seconds:
        ratio = summarise([b / a for a, b in zip(seconds["weft"], seconds["make_fx"], strict=True)])
        row["make_fx, s"] = round(summarise(seconds["make_fx"]).median, 4)
        row["make_fx / weft"] = round(ratio.median, 3)
        row["interval_of_ratio"] = [ratio.interval.low, ratio.interval.high] if ratio.interval.is_known else None
    row["raw_s"] = {way: [round(value, 4) for value in values] for way, values in seconds.items()}
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time the capture of training steps.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    load_before = os.getloadavg()[0]
    rows = [row_of("the first in a process", *measure(FIRST))]
    _make_fx(lambda state, batch: (state, batch), torch.ones(1), torch.ones(1))  # imports what it needs
    rows += [row_of(model, *measure(subject)) for model, subject in SUBJECTS.items()]
    for row in rows:
        print(f"{row['model']}: {row['operators']} operators, {row['weft, s']} s; make_fx {row['make_fx, s']} s")
    write_json(
        options.out,
        {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": describe_machine(),
            "load_before": load_before,
            "versions": describe_versions(),
            "source": describe_source(),
            "rows": rows,
        },
    )


def _make_fx(step: Any, state: Any, batch: Any) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx  # seconds of imports, which weft does without

    leaves, arguments = flatten({"state": state, "batch": batch})

    def flat_step(*tensors: Tensor) -> list[Tensor]:
        given = unflatten(arguments, tensors)
        outputs, new_state = step(given["state"], given["batch"])
        return flatten({"outputs": outputs, "state": new_state})[0]

    return make_fx(flat_step, tracing_mode="fake")(*(leaf.detach() for leaf in leaves))


if __name__ == "__main__":
    main()
