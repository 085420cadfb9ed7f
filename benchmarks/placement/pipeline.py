"""A GPT of 12 layers in two stages: Weft's pipeline against torch.distributed.pipelining, over Gloo and over "weft".

    python -m benchmarks.placement.pipeline [--rounds 12] [--out benchmarks/results/pipeline.json]

Two ranks of one thread each, one step (8 micro-batches forward and backward, 1F1B) of the same stages with the same
weights and tokens. All are in the same two processes and take turns in an order that changes from round to round; the
time is that of the slower rank. "one rank" is rank 0 with all layers and the same micro-batches, while rank 1 waits.
Gradients of all are compared first.

    ideal        n stages are n * m / (m + n - 1) times as fast as one rank: 1.78 times for n = 2, m = 8
    efficiency   the share of that which Weft reaches
"""

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.atomic import write_json
from weft.distributed.group import AbstractGroup
from weft.distributed.place import find_launch, open_group
from weft.distributed.placement import MeshGroups
from weft.distributed.placement.pipeline import make_pipeline
from weft.engines.local import run_ranks
from weft.engines.rank_program import RankProgram
from weft.graph import EagerExecutor
from weft.metrics.comparison import compare_pairs
from weft.metrics.metric import METRICS
from weft.metrics.statistics import summarise
from weft.records.machine import describe_machine, describe_source, describe_versions
from weft.specs import Batch, TaskSpec, TensorSpec, parse_plan
from weft.training.losses import LOSSES
from weft.training.models.char_gpt import char_gpt
from weft.training.placement import WholeModel
from weft.training.process import keep_freed_memory

__all__ = ["main", "measure_rank", "row_of"]

RESULTS = Path(__file__).parent.parent / "results" / "pipeline.json"
NUM_STAGES, NUM_MICRO, NUM_STEPS, MIN_ROUNDS = 2, 8, 2, 6
VOCABULARY, LENGTH, BATCH_SIZE = 96, 64, 16
PEERS = ("torch over gloo", "torch over weft")
SCHEDULES = {"weft": "1f1b", "weft, zero bubble": "zero_bubble"}
EFFICIENCY_BAR = 0.85

Gradients = dict[str, Tensor]
Step = Callable[[], Gradients]


def measure_rank(num_rounds: int) -> dict[str, list[float]]:
    """The rank program: seconds per step by system, round by round."""
    import torch.distributed as dist

    from weft.distributed.torch_backend import register

    torch.set_num_threads(1)
    keep_freed_memory()
    group = open_group(find_launch(), "shared_memory")
    register()
    store = f"file://{os.environ['WEFT_MEETING']}/peers"
    dist.init_process_group("gloo", init_method=store, rank=group.rank, world_size=group.size)
    peers = {"torch over gloo": dist.group.WORLD, "torch over weft": dist.new_group(backend="weft")}
    try:
        steps = {name: _weft_step(group, schedule) for name, schedule in SCHEDULES.items()}
        steps |= {name: _torch_step(group, peer) for name, peer in peers.items()}
        _check_equal(steps)
        return _take_turns(group, steps | {"one rank": _step_alone(group)}, num_rounds)
    finally:
        dist.destroy_process_group()
        group.close()


def _take_turns(group: AbstractGroup, steps: Mapping[str, Step], num_rounds: int) -> dict[str, list[float]]:
    names, values = list(steps), {name: list[float]() for name in steps}
    for round_ in range(num_rounds):
        turn = round_ % len(names)
        for name in names[turn:] + names[:turn]:
            group.barrier()
            began = time.perf_counter()
            for _ in range(NUM_STEPS):
                steps[name]()
            values[name].append((time.perf_counter() - began) / NUM_STEPS)
    return values


def _check_equal(steps: Mapping[str, Step]) -> None:
    first, *others = (step() for step in steps.values())
    for gradients in others:
        torch.testing.assert_close(gradients, first, rtol=1e-3, atol=1e-6)


def _model() -> nn.Module:
    torch.manual_seed(0)
    task = TaskSpec(TensorSpec((LENGTH,), torch.int64), VOCABULARY)
    return char_gpt(task, width=128, num_layers=12, num_heads=4, tied=False)


def _batch() -> Batch:
    tokens = torch.randint(VOCABULARY, (2, BATCH_SIZE, LENGTH), generator=torch.Generator().manual_seed(1))
    return Batch((tokens[0],), (tokens[1],))


def _weft_step(group: AbstractGroup, schedule: str) -> Step:
    plan = parse_plan(f"pipeline={NUM_STAGES} schedule={schedule}({NUM_MICRO})")
    placement = make_pipeline(MeshGroups(group, plan.mesh(group.rank)), plan, WholeModel())
    batch = _batch()
    placement.look_at(tuple(tensor[:2] for tensor in batch.inputs))
    executor = placement.execute(placement.place(_model()), LOSSES["cross_entropy"](), EagerExecutor)
    state = executor.initial_state()

    def step() -> Gradients:
        found: dict[str, Tensor | None] = {}
        executor(state, batch, found.__setitem__)
        return {name: gradient for name, gradient in sorted(found.items()) if gradient is not None}

    return step


def _torch_step(group: AbstractGroup, peer: Any) -> Step:
    """The same stages by torch.distributed.pipelining."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from weft.distributed.placement.pipeline.partition import partition

    batch, device = _batch(), torch.device("cpu")
    cut = partition(_model(), tuple(tensor[:2] for tensor in batch.inputs), NUM_STAGES)
    module = cut.stages[group.rank].module
    stage = PipelineStage(module, group.rank, NUM_STAGES, device, group=peer)
    loss = LOSSES["cross_entropy"]()
    schedule = Schedule1F1B(stage, NUM_MICRO, lambda found, target: loss(_only(found), target))

    def step() -> Gradients:
        for parameter in module.parameters():
            parameter.grad = None
        if group.rank == 0:
            schedule.step(*batch.inputs)
        else:
            schedule.step(target=batch.targets[0], losses=[])
        return {name: p.grad for name, p in sorted(module.named_parameters()) if p.grad is not None}

    return step


def _only(found: Any) -> Tensor:
    tensor: Tensor = found[0] if isinstance(found, tuple | list) else found
    return tensor


def _step_alone(group: AbstractGroup) -> Step:
    model, loss, micros = _model(), LOSSES["cross_entropy"](), _batch().split(NUM_MICRO)

    def step() -> Gradients:
        if group.rank == 0:
            model.zero_grad()
            for micro in micros:
                (loss(model(*micro.inputs), *micro.targets) / NUM_MICRO).backward()
        return {}

    return step


def row_of(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """Medians of the slower rank, with intervals (95%); Weft against each peer, and against the ideal."""
    values = {name: [max(pair) for pair in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}
    row: dict[str, Any] = {"benchmark": "pipeline", "stages": NUM_STAGES, "micro_batches": NUM_MICRO}
    for name, seconds in values.items():
        summary = summarise([1e3 * value for value in seconds])
        row[f"{name}, ms"] = [round(x, 2) for x in (summary.median, summary.interval.low, summary.interval.high)]
    for name in PEERS:
        row[f"{name} / weft"] = {**_ratio(values[name], values["weft"]), "bar": 1.0}
    ideal = NUM_STAGES * NUM_MICRO / (NUM_MICRO + NUM_STAGES - 1)
    alone = [seconds / ideal for seconds in values["one rank"]]
    row["efficiency"] = {**_ratio(alone, values["weft"]), "bar": EFFICIENCY_BAR}
    row["efficiency of torch over gloo"] = _ratio(alone, values["torch over gloo"])
    row["raw_ms"] = {name: [round(1e3 * value, 3) for value in seconds] for name, seconds in values.items()}
    return row


def _ratio(seconds: Sequence[float], own: Sequence[float]) -> dict[str, Any]:
    found = compare_pairs(list(seconds), list(own), METRICS["step_time"])
    return {
        "ratio": round(found.ratio, 3),
        "interval": [round(found.interval.low, 3), round(found.interval.high, 3)],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time a pipeline against torch.distributed.pipelining.")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, help=f"write the results here, e.g. {RESULTS}")
    options = parser.parse_args(arguments)
    load_before = os.getloadavg()[0]
    given = {"num_rounds": max(MIN_ROUNDS, options.rounds)}
    ranks = run_ranks(RankProgram("benchmarks.placement.pipeline:measure_rank", given), NUM_STAGES)
    row = row_of(ranks)
    for name, found in row.items():
        if name.endswith(", ms"):
            print(f"{name.removesuffix(', ms')}: {found[0]:.1f} ms ({found[1]:.1f} to {found[2]:.1f})")
        elif isinstance(found, dict) and "ratio" in found:
            low, high = found["interval"]
            print(f"{name}: {found['ratio']:.3f} ({low:.3f} to {high:.3f})")
    if options.out:
        about = {"date": date.today().isoformat(), "machine": describe_machine(), "load_before": load_before}
        versions = {"versions": describe_versions(), "source": describe_source()}
        write_json(options.out, {**about, **versions, "rows": [row]})


if __name__ == "__main__":
    main()
