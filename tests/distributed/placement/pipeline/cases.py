"""What the tests of the executor share: proofs on virtual ranks, and models cut by hand."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed.placement.pipeline.plain_partition import Run
from tests.proving.test_lockstep import case_of, small_mlp, with_settings
from weft.distributed.channels.all_reduce import replicas_in
from weft.distributed.group import AbstractGroup
from weft.distributed.placement import MeshGroups
from weft.distributed.placement.pipeline import Partition, StageProgram, make_pipeline
from weft.distributed.virtual import run_virtual
from weft.graph import EagerExecutor
from weft.proving.lockstep import compare_ranks, trace_ranks, trace_references
from weft.proving.proof import Proof
from weft.recipes import pydoc_gpt
from weft.specs import Batch, parse_plan
from weft.training.losses import LOSSES
from weft.training.placement import WholeModel
from weft.training.recipe import Recipe

__all__ = ["SCHEDULES", "Skipping", "execute", "prove", "skipping_partition", "small_gpt", "small_mlp", "train_alone"]

SCHEDULES = ("gpipe(4)", "1f1b(4)", "interleaved(4,chunks=2)", "zero_bubble(4)")


def small_gpt(**settings: object) -> Recipe:
    """Tied embeddings, dropout, clipping."""
    base = {"model__width": 8, "model__num_layers": 4, "model__num_heads": 2, "model__dropout": 0.2, "batch_size": 8}
    return with_settings(pydoc_gpt(), **{**base, **settings})


def prove(recipe: Recipe, plan: str, num_steps: int = 2, dtype: torch.dtype | None = None) -> Proof:
    case = replace(case_of(recipe, plan, num_steps), dtype=dtype)

    def trace(group: AbstractGroup) -> object:
        return trace_ranks(case, replicas_in(MeshGroups(group, case.plan.mesh(group.rank)), case.plan))

    traces = run_virtual(trace, case.plan.num_ranks).results
    references = trace_references(case)
    of_ranks = [references[case.plan.mesh(rank).replica] for rank in range(case.plan.num_ranks)]
    return compare_ranks(list(traces), of_ranks, case)


class Skipping(nn.Module):
    """Three layers, an input that goes around the second and a mask that all take; the last is the first again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = x[:, :1] > 0
        h = self.first(x)
        out: Tensor = self.last((self.second(torch.relu(h)) + h) * mask)
        return out


class _Head(Run):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return self.get_submodule("first")(x), x[:, :1] > 0


class _Middle(Run):
    def forward(self, h: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (self.get_submodule("second")(h.relu_()),)  # in place, on what another stage sent


class _Tail(Run):
    def forward(self, y: Tensor, h: Tensor, mask: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (self.get_submodule("last")((y + h) * mask),)


def skipping_partition(module: nn.Module, _inputs: tuple[Tensor, ...], num_stages: int) -> Partition:
    """Three stages; `h` and the mask go from the first straight to the last."""
    assert isinstance(module, Skipping) and num_stages == 3
    return Partition(
        (
            StageProgram(_Head({"first": module.first}), ("input/0",), ("h", "mask")),
            StageProgram(_Middle({"second": module.second}), ("h",), ("y",)),
            StageProgram(_Tail({"last": module.last}), ("y", "h", "mask"), ("output",)),
        ),
        {},
    )


Found = tuple[float, dict[str, Tensor | None], Tensor]


def execute(
    make_module: Callable[[], nn.Module],
    partition: Callable[[nn.Module, tuple[Tensor, ...], int], Partition],
    plan: str,
    batches: Sequence[Batch],
    wrap: Callable[[AbstractGroup], AbstractGroup] = lambda group: group,
    **options: Any,
) -> list[list[Found]]:
    """The losses, gradients and predictions of every rank for every batch, one after the other; options are those of
    the virtual cluster."""
    chosen = parse_plan(plan)

    def program(group: AbstractGroup) -> list[Found]:
        groups = MeshGroups(wrap(group), chosen.mesh(group.rank))
        placement = make_pipeline(groups, chosen, WholeModel(), partition)
        module = placement.place(make_module())
        executor = placement.execute(module, LOSSES["mse"](), EagerExecutor)
        found, state = [], executor.initial_state()
        for batch in batches:
            gradients: dict[str, Tensor | None] = {}
            outputs, state = executor(state, batch, gradients.__setitem__)
            found.append((outputs.loss.item(), gradients, outputs.predictions))
        groups.world.barrier()
        return found

    return list(run_virtual(program, chosen.num_ranks, **options).results)


def train_alone(module: nn.Module, batches: Sequence[Batch]) -> list[Found]:
    """The same in one process, without micro-batches."""
    executor = EagerExecutor(module, LOSSES["mse"]())
    found, state = [], executor.initial_state()
    for batch in batches:
        gradients: dict[str, Tensor | None] = {}
        outputs, state = executor(state, batch, gradients.__setitem__)
        found.append((outputs.loss.item(), gradients, outputs.predictions))
    return found
