"""Experts on four ranks: the share of a step that is spent in all-to-all, against the cost formula.

    python -m benchmarks.placement.experts [--rounds 12] [--out benchmarks/results/experts.json]

Four ranks of one thread each train a GPT with two layers of 8 experts, two on each rank (`expert=4`). In each round
they measure what a message costs (the probe's ping-pong, alpha and beta), train some steps, and send the all-to-alls of
the last step once more, with nothing to compute between them:

    step           whole steps, the slowest rank's
    in_all_to_all  seconds of a step that a rank was in all-to-alls, the mean of ranks: messages, and waiting for ranks
                   that still compute
    messages       the same all-to-alls again, when all ranks are there
    formula        alpha and beta times the rounds and bytes of `expert_cost` (weft/planning/placement_cost.py), and of
                   the counts that go before

A machine with fewer cores than ranks makes ranks wait for each other's computation: that is in the second, not in the
third.
"""

import time
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any, final

import torch
from torch import Tensor

from benchmarks.placement.turns import open_rank, report
from weft.distributed.channels.all_reduce import replicas_in
from weft.distributed.collectives import probe
from weft.distributed.group import AbstractGroup
from weft.distributed.group.calls import AllToAll, Call
from weft.distributed.group.group import AbstractWork
from weft.distributed.placement import MeshGroups
from weft.engines.local import run_ranks
from weft.engines.rank_program import RankProgram
from weft.metrics.statistics import summarise
from weft.planning.collective_cost import collective_cost
from weft.planning.cost import Cost
from weft.planning.placement_cost import expert_cost
from weft.recipes import find_recipe
from weft.runs.job import with_plan, with_settings
from weft.training.build import build_splits, build_task
from weft.training.loop import take_step
from weft.training.recipe import Recipe

__all__ = ["main", "measure_rank", "predict", "row_of"]

NUM_RANKS, NUM_EXPERTS, NUM_LAYERS, WIDTH, NUM_STEPS, NUM_WARM_UPS = 4, 8, 2, 128, 4, 1
SETTINGS = (
    f"model.width={WIDTH}",
    f"model.hidden={4 * WIDTH}",
    f"model.num_layers={NUM_LAYERS}",
    f"model.num_experts={NUM_EXPERTS}",
    "batch_size=64",
)


@final
class TimedGroup(AbstractGroup):
    """Wraps a group, and notes the seconds and sizes of its all-to-alls, and of those of groups that are split off."""

    def __init__(self, inner: AbstractGroup, noted: list[tuple[float, AllToAll]] | None = None) -> None:
        super().__init__(inner.rank, inner.size, clock=inner.clock, generation=inner.generation)
        self._inner = inner
        self.noted: list[tuple[float, AllToAll]] = [] if noted is None else noted

    def start(self, call: Call) -> AbstractWork:
        return self._inner.start(call)

    def run(self, call: Call) -> None:
        began = time.perf_counter()
        self._inner.run(call)
        if isinstance(call, AllToAll):
            self.noted.append((time.perf_counter() - began, call))

    def split(self, colour: int, key: int) -> AbstractGroup:
        return TimedGroup(self._inner.split(colour, key), self.noted)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return self._inner.empty(shape, dtype)

    def close(self) -> None:
        self._inner.close()


def recipe_of(settings: Sequence[str] = SETTINGS) -> Recipe:
    return with_plan(with_settings(find_recipe("pydoc_moe"), settings), f"data=1 expert={NUM_RANKS}", None)


def measure_rank(recipe: dict[str, Any], num_rounds: int) -> list[dict[str, Any]]:
    """The rank program: for each round the network, and of a step its seconds, those of all-to-alls, their bytes."""
    chosen = Recipe.from_dict(recipe)
    group = TimedGroup(open_rank())
    try:
        plan = chosen.mutable.plan
        replicas = replicas_in(MeshGroups(group, plan.mesh(group.rank)), plan)
        task, state = build_task(chosen, build_splits(chosen), 0, replicas)
        replicas.join(state.model)
        rounds = []
        for _ in range(num_rounds):
            fit = probe(group)
            for step in range(NUM_WARM_UPS + NUM_STEPS):
                if step == NUM_WARM_UPS:
                    group.barrier()
                    began = time.perf_counter()
                    group.noted.clear()
                state, _ = take_step(task, state)
            seconds, noted = (time.perf_counter() - began) / NUM_STEPS, list(group.noted)
            again = noted[-len(noted) // NUM_STEPS :]
            rounds.append(
                {
                    "alpha": fit.alpha,
                    "beta": fit.beta,
                    "step": seconds,
                    "in_all_to_all": sum(spent for spent, _ in noted) / NUM_STEPS,
                    "messages": _send_again(group, [call for _, call in again]),
                    "bytes": sum(call.tensor.nbytes for _, call in noted) / NUM_STEPS,
                }
            )
        return rounds
    finally:
        group.close()


def _send_again(group: AbstractGroup, calls: Sequence[AllToAll]) -> float:
    group.barrier()
    began = time.perf_counter()
    for call in calls:
        group.run(call)
    return time.perf_counter() - began


def predict(alpha: float, beta: float, num_bytes: float) -> float:
    """Seconds of a step's all-to-alls of so many bytes, those of a rank's own experts and of counts among them."""
    counts = 8.0 * NUM_EXPERTS
    cost = Cost()
    for _ in range(NUM_LAYERS):
        tokens = (num_bytes / NUM_LAYERS - counts) / 4
        cost = cost.plus(expert_cost(NUM_RANKS, tokens))
        cost = cost.plus(collective_cost("all_to_all", NUM_RANKS, counts).busiest)
    return cost.rounds * alpha + cost.path_bytes * beta


def row_of(ranks: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Medians over rounds, with intervals (95%), in milliseconds and shares of a step."""
    rounds = [
        {
            "step": max(one["step"] for one in found),
            "in_all_to_all": mean(one["in_all_to_all"] for one in found),
            "messages": max(one["messages"] for one in found),
            "formula": predict(found[0]["alpha"], found[0]["beta"], mean(one["bytes"] for one in found)),
            "bytes": mean(one["bytes"] for one in found),
            "alpha": found[0]["alpha"],
            "beta": found[0]["beta"],
        }
        for found in zip(*ranks, strict=True)
    ]
    row: dict[str, Any] = {"ranks": NUM_RANKS, "experts": NUM_EXPERTS, "raw": rounds}
    for name in ("step", "in_all_to_all", "messages", "formula"):
        summary = summarise([1e3 * one[name] for one in rounds])
        row[f"{name}_ms"] = round(summary.median, 3)
        row[f"interval_of_{name}_ms"] = [round(summary.interval.low, 3), round(summary.interval.high, 3)]
        row[f"{name}_share"] = round(median(one[name] / one["step"] for one in rounds), 4)
    row["measured_over_formula"] = round(median(one["messages"] / one["formula"] for one in rounds), 3)
    return row


def _measure(num_rounds: int, _options: Any) -> list[dict[str, Any]]:
    given = {"recipe": recipe_of().to_dict(), "num_rounds": num_rounds}
    return [row_of(run_ranks(RankProgram("benchmarks.placement.experts:measure_rank", given), NUM_RANKS))]


def _show(row: Mapping[str, Any]) -> None:
    for name in ("step", "in_all_to_all", "messages", "formula"):
        low, high = row[f"interval_of_{name}_ms"]
        print(
            f"{name:14} {row[f'{name}_ms']:8.2f} ms  ({low:.2f} to {high:.2f})  {row[f'{name}_share']:6.1%} of a step"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    report("Time the all-to-alls of experts on four ranks.", "experts", _measure, _show, arguments)


if __name__ == "__main__":
    main()
