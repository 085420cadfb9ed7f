"""A VGG-like network on four ranks: all layers data parallel, all split, or each kind in its own way.

    python -m benchmarks.placement.layers [--rounds 12] [--out benchmarks/results/layers.json]

    data=4      every rank has all layers and a quarter of the samples; gradients of all parameters are added up
    tensor=4    every rank has a quarter of each layer and all samples; activations between layers are added up
    linear=4    convolutions as in data=4; linear layers split, for the samples of all ranks (Krizhevsky, 2014)

Made pictures of 3 x 32 x 32, 64 in a batch; six convolutions with 0.3 million parameters and three linear layers with
8.4 million. All plans are in the same four processes of one thread each and take turns, a few steps each (gradients,
exchange, update), in an order that changes from round to round; the time is that of the slowest rank. Losses of the
first steps are compared first. Bytes are those that a rank sends to others in a step, counted in its groups: of an
all-reduce 2 (N - 1) / N of the message, as of a ring.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from benchmarks.placement.turns import milliseconds, open_rank, raw_ms, report, slowest, take_turns, times_as_fast
from weft.distributed.channels.all_reduce import replicas_in
from weft.distributed.channels.run_spec import RunSpec
from weft.distributed.group import AbstractGroup
from weft.distributed.group.calls import AllGather, AllReduce, AllToAll, Call, ReduceScatter
from weft.distributed.group.group import AbstractWork
from weft.distributed.placement import MeshGroups
from weft.engines.local import run_ranks
from weft.engines.rank_program import RankProgram
from weft.recipes import fashion_vgg
from weft.training.build import build_splits, build_task
from weft.training.loop import Task, TrainingState, take_step

__all__ = ["main", "measure_rank", "row_of"]

NUM_RANKS, NUM_STEPS = 4, 2
PLANS = ("data=4", "tensor=4", "linear=4")
SETTINGS = {
    "data": "gratings",
    "data.num_samples": "800",
    "model.channels": "32,64,128",
    "model.hidden": "2048",
    "model.dropout": "0.0",
    "batch_size": "64",
    "optimizer": "momentum",
    "optimizer.lr": "0.01",
}


@final
class CountingGroup(AbstractGroup):
    """Wraps a group, and those that are split from it; `sent` has the bytes for others of all of them."""

    def __init__(self, inner: AbstractGroup, sent: list[float]) -> None:
        super().__init__(inner.rank, inner.size, clock=inner.clock, generation=inner.generation)
        self._inner, self.sent = inner, sent

    def start(self, call: Call) -> AbstractWork:
        self.sent[0] += _bytes_sent(call, self.rank, self.size)
        return self._inner.start(call)

    def run(self, call: Call) -> None:
        self.sent[0] += _bytes_sent(call, self.rank, self.size)
        self._inner.run(call)

    def split(self, colour: int, key: int) -> AbstractGroup:
        return CountingGroup(self._inner.split(colour, key), self.sent)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return self._inner.empty(shape, dtype)

    def close(self) -> None:
        self._inner.close()


def _bytes_sent(call: Call, rank: int, size: int) -> float:
    if isinstance(call, AllReduce):
        return 2 * (size - 1) / size * call.tensor.nbytes
    if isinstance(call, AllGather):
        return (size - 1) * call.tensor.nbytes
    if isinstance(call, ReduceScatter):
        return call.tensor.nbytes - call.output.nbytes
    if isinstance(call, AllToAll):
        sizes = call.send_sizes or (len(call.tensor) // size,) * size
        return (sum(sizes) - sizes[rank]) * call.tensor.nbytes / max(1, len(call.tensor))
    return 0.0


@dataclass
class Training:
    task: Task
    state: TrainingState
    group: CountingGroup

    def step(self) -> float:
        self.state, result = take_step(self.task, self.state)
        return result.loss


def measure_rank(num_rounds: int) -> dict[str, dict[str, list[float]]]:
    """The rank program: seconds per step by plan, round by round, and the bytes of one step."""
    world = open_rank()
    trainings = {plan: _begin(plan, world) for plan in PLANS}
    losses = {plan: [training.step() for _ in range(3)] for plan, training in trainings.items()}
    for plan in PLANS[1:]:
        torch.testing.assert_close(losses[plan], losses[PLANS[0]], rtol=1e-3, atol=1e-4)
    sent = {plan: list[float]() for plan in PLANS}

    def note_bytes(plan: str) -> None:
        total, trainings[plan].group.sent[0] = trainings[plan].group.sent[0], 0.0
        sent[plan].append(total / (1 + NUM_STEPS))  # one step of a turn is not timed

    for training in trainings.values():
        training.group.sent[0] = 0.0
    steps = {plan: training.step for plan, training in trainings.items()}
    seconds = take_turns(world, steps, num_rounds, num_steps=NUM_STEPS, after_turn=note_bytes)
    world.barrier()
    return {"seconds": seconds, "sent": sent}


def _begin(plan: str, world: AbstractGroup) -> Training:
    recipe = fashion_vgg().with_setting("plan", plan)
    for key, value in SETTINGS.items():
        recipe = recipe.with_setting(key, value)
    counting = CountingGroup(world, [0.0])
    mesh = recipe.mutable.plan.mesh(world.rank)
    replicas = replicas_in(MeshGroups(counting, mesh), recipe.mutable.plan, RunSpec.of(recipe, (0,)))
    task, state = build_task(recipe, build_splits(recipe), 0, replicas)
    replicas.join(state.model)
    return Training(task, state, counting)


def row_of(ranks: Sequence[Mapping[str, Mapping[str, Sequence[float]]]]) -> dict[str, Any]:
    """Medians of the slowest rank with their intervals (95%), megabytes of a rank, and how many times as long as
    `linear` each other plan takes."""
    values = slowest([rank["seconds"] for rank in ranks])
    row: dict[str, Any] = {"benchmark": "layers", "ranks": NUM_RANKS}
    for plan, seconds in values.items():
        row[f"{plan}, ms"] = milliseconds(seconds)
        row[f"{plan}, MB sent"] = round(max(max(rank["sent"][plan]) for rank in ranks) / 1e6, 3)
    for plan in PLANS[:-1]:
        row[f"{plan} / linear=4"] = times_as_fast(values[plan], values["linear=4"])
    return {**row, "raw_settings": SETTINGS, "raw_ms": raw_ms(values)}


def _measure(num_rounds: int, _options: Any) -> list[dict[str, Any]]:
    program = RankProgram("benchmarks.placement.layers:measure_rank", {"num_rounds": num_rounds})
    return [row_of(run_ranks(program, NUM_RANKS))]


def _show(row: Mapping[str, Any]) -> None:
    for plan in PLANS:
        middle, low, high = row[f"{plan}, ms"]
        print(f"{plan}: {middle:.1f} ms ({low:.1f} to {high:.1f}), {row[f'{plan}, MB sent']:.2f} MB sent by a rank")
    best = min(PLANS, key=lambda plan: float(row[f"{plan}, ms"][0]))
    least = min(PLANS, key=lambda plan: float(row[f"{plan}, MB sent"]))
    print(f"quickest: {best}; fewest bytes: {least}")


def main(arguments: Sequence[str] | None = None) -> None:
    report("Time a VGG-like network under three plans.", "layers", _measure, _show, arguments)


if __name__ == "__main__":
    main()
