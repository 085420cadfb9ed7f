"""A captured step of data parallelism has the bits of the eager one, on virtual ranks and on processes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed.group.shared_memory.conftest import run_ranks
from weft.distributed.graph_collectives import use_group_in_graphs
from weft.distributed.group.group import AbstractGroup
from weft.distributed.placement import DataParallel
from weft.distributed.virtual import run_virtual
from weft.graph import EagerExecutor, Program, capture, rewrite, start_all_reduce, training_step, wait
from weft.specs import Batch
from weft.training.optimizers import OPTIMIZERS, Optimizer, Shared
from weft.training.replicas import Update

__all__ = ["run_ranks"]

LOSS = nn.functional.mse_loss
NUM_STEPS = 3


def build() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def batch_of(rank: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(10 * rank + step)
    return Batch((torch.randn(4, 3, generator=generator),), (torch.randn(4, 2, generator=generator),))


def make_optimizer() -> Optimizer:
    optimizer = OPTIMIZERS["momentum"](lr=0.1)
    assert isinstance(optimizer, Optimizer)
    return optimizer


def eager(group: AbstractGroup) -> list[Any]:
    executor, optimizer = EagerExecutor(build(), LOSS), make_optimizer()
    state, replicas = executor.initial_state(), DataParallel(group)
    replicas.join(state)
    slots = optimizer.init(state.parameters)
    for step in range(NUM_STEPS):
        outputs, state = executor(state, batch_of(group.rank, step), replicas.begin(1 / group.size))
        _, slots = replicas.finish(float(outputs.loss), Update(optimizer, state.parameters, slots, 0.1, None))
    return [tensor.detach().flatten().tolist() for tensor in state.parameters.values()]


def parallel_step(module: nn.Module, rule: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Forward, backward, the gradients' mean over ranks, update: one step, as a user writes it."""
    gradients_of = training_step(module, LOSS)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        outputs, _ = gradients_of(state, batch)
        promises = {name: start_all_reduce(gradient, "mean") for name, gradient in outputs["gradients"].items()}
        means = {name: wait(promise) for name, promise in promises.items()}
        shared = rule.new_input(Shared(state["lr"], state["step"]))
        new = {n: rule.update_rule(means[n], p, state["slots"][n], shared) for n, p in state["parameters"].items()}
        parameters, slots = ({n: pair[i] for n, pair in new.items()} for i in (0, 1))
        after = {**state, "parameters": parameters, "slots": slots, "lr": shared.lr, "step": shared.step}
        return {"loss": outputs["loss"]}, after

    return step


def captured(group: AbstractGroup) -> list[Any]:
    module, rule = build(), make_optimizer().rule
    parameters = {name: tensor.detach() for name, tensor in module.named_parameters()}
    state: Any = {
        "parameters": parameters,
        "buffers": {},
        "slots": {name: rule.initial_slots(tensor) for name, tensor in parameters.items()},
        "lr": torch.tensor(0.1, dtype=torch.float64),
        "step": torch.tensor(0.0, dtype=torch.float64),
    }
    program = Program(rewrite(capture(parallel_step(module, rule), state, plain(batch_of(0, 0)))))
    with use_group_in_graphs(group):
        for step in range(NUM_STEPS):
            _, state, _ = program(state, plain(batch_of(group.rank, step)))
    return [tensor.flatten().tolist() for tensor in state["parameters"].values()]


def plain(batch: Batch) -> dict[str, tuple[Tensor, ...]]:
    return {"inputs": batch.inputs, "targets": batch.targets}


def test_virtual_ranks_have_the_bits_of_the_eager_path() -> None:
    found, expected = run_virtual(captured, 2).results, run_virtual(eager, 2).results
    assert found[0] == found[1] == expected[0] == expected[1]


def test_ranks_over_shared_memory_have_the_bits_of_the_eager_path(run_ranks: Callable[..., list[Any]]) -> None:
    found = run_ranks(captured, 2)
    assert found[0] == found[1] == run_virtual(eager, 2).results[0]
