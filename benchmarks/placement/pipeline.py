"""A GPT of 12 layers in two stages: Weft's pipeline against torch.distributed.pipelining, over Gloo and over "weft".

    python -m benchmarks.placement.pipeline [--rounds 20] [--out benchmarks/results/pipeline.json]

Two ranks of one thread each, one step (8 micro-batches forward and backward, 1F1B) of the same stages with the same
weights and tokens. All are in the same two processes and take turns in an order that changes from round to round; the
time is that of the slower rank. "one rank" is rank 0 with all layers and the same micro-batches, while rank 1 waits.
Gradients of all are compared first.

    efficiency               n stages should be n * m / (m + n - 1) times as fast as one rank, 1.78 times for n = 2 and
                             m = 8: the share of that which is reached
    share of two busy cores  the same, but for what two ranks cost each other on this machine: against (m + n - 1) / m
                             times as long as two ranks take for the passes of their stages when they never talk
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.placement.turns import (
    milliseconds,
    open_rank,
    raw_ms,
    report,
    slowest,
    take_turns,
    times_as_fast,
    use_peers,
)
from weft.distributed.group import AbstractGroup
from weft.distributed.placement import MeshGroups
from weft.distributed.placement.pipeline import make_pipeline
from weft.distributed.placement.pipeline.partition import partition
from weft.engines.local import run_ranks
from weft.engines.rank_program import RankProgram
from weft.graph import EagerExecutor
from weft.specs import Batch, TaskSpec, TensorSpec, parse_plan
from weft.training.losses import LOSSES
from weft.training.models.char_gpt import char_gpt
from weft.training.placement import WholeModel

__all__ = ["main", "measure_rank", "row_of"]

NUM_STAGES, NUM_MICRO, NUM_STEPS = 2, 8, 2
VOCABULARY, LENGTH, BATCH_SIZE = 96, 64, 16
PEERS = ("torch over gloo", "torch over weft")
SCHEDULES = {"weft": "1f1b", "weft, zero bubble": "zero_bubble"}
EFFICIENCY_BAR = 0.85

Gradients = dict[str, Tensor]
Step = Callable[[], Gradients]


def measure_rank(num_rounds: int) -> dict[str, list[float]]:
    """The rank program: seconds per step by system, round by round."""
    with closing(open_rank()) as group, use_peers(group) as backends:
        steps = {name: _weft_step(group, schedule) for name, schedule in SCHEDULES.items()}
        steps |= {f"torch over {name}": _torch_step(group, peer) for name, peer in backends.items()}
        _check_equal(steps)
        steps |= {"one rank": _step_alone(group), "stages that never talk": _step_of_stage(group)}
        return take_turns(group, steps, num_rounds, num_steps=NUM_STEPS)


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


def _step_of_stage(group: AbstractGroup) -> Step:
    """The passes of this rank's stage, one after the other, with a tensor of its own for what the other would send."""
    batch = _batch()
    micros = batch.split(NUM_MICRO)
    cut = partition(_model(), tuple(tensor[:2] for tensor in batch.inputs), NUM_STAGES)
    module, loss = cut.stages[group.rank].module, LOSSES["cross_entropy"]()
    value = _only(cut.stages[0].module(*micros[0].inputs)).detach()

    def step() -> Gradients:
        module.zero_grad()
        for micro in micros:
            if group.rank == 0:
                _only(module(*micro.inputs)).backward(value)
            else:
                predictions = _only(module(value.clone().requires_grad_()))
                (loss(predictions, *micro.targets) / NUM_MICRO).backward()
        return {}

    return step


def row_of(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """Medians of the slower rank, with intervals (95%); Weft against each peer, and against the ideal."""
    values = slowest(ranks)
    row: dict[str, Any] = {"benchmark": "pipeline", "stages": NUM_STAGES, "micro_batches": NUM_MICRO}
    row |= {f"{name}, ms": milliseconds(seconds) for name, seconds in values.items()}
    for name in PEERS:
        for own in SCHEDULES:
            row[f"{name} / {own}"] = times_as_fast(values[name], values[own], 1.0)
    filled = (NUM_MICRO + NUM_STAGES - 1) / NUM_MICRO
    alone = [seconds * filled / NUM_STAGES for seconds in values["one rank"]]
    ceiling = [seconds * filled for seconds in values["stages that never talk"]]
    for name in (*SCHEDULES, PEERS[0]):
        row[f"efficiency, {name}"] = times_as_fast(alone, values[name], EFFICIENCY_BAR if name in SCHEDULES else None)
        row[f"share of two busy cores, {name}"] = times_as_fast(ceiling, values[name])
    return {**row, "raw_ms": raw_ms(values)}


def _measure(num_rounds: int, _options: Any) -> list[dict[str, Any]]:
    given = {"num_rounds": num_rounds}
    return [row_of(run_ranks(RankProgram("benchmarks.placement.pipeline:measure_rank", given), NUM_STAGES))]


def _show(row: Mapping[str, Any]) -> None:
    for name, found in row.items():
        if name.endswith(", ms"):
            print(f"{name.removesuffix(', ms')}: {found[0]:.1f} ms ({found[1]:.1f} to {found[2]:.1f})")
        elif isinstance(found, dict) and "ratio" in found:
            low, high = found["interval"]
            print(f"{name}: {found['ratio']:.3f} ({low:.3f} to {high:.3f})")


def main(arguments: Sequence[str] | None = None) -> None:
    title = "Time a pipeline against torch.distributed.pipelining."
    report(title, "pipeline", _measure, _show, arguments, rounds=20)


if __name__ == "__main__":
    main()
