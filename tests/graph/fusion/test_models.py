"""Every built-in model, its update in the graph, rewritten and fused: the losses of eager steps, but for rounding."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from tests.graph.contract import take
from tests.graph.executors.test_built_in_models import SUBJECTS, cross_entropy, draw
from tests.graph.fusion.test_fuse import always
from tests.graph.steps import plain
from weft.graph import EagerExecutor, Graph, Step, capture, check_shapes, rewrite
from weft.graph.fusion import fuse, regions_of
from weft.graph.ir.interpreter import call_of, replay
from weft.graph.ir.pytree import flatten_as, unflatten
from weft.training.optimizers import OPTIMIZERS, Momentum
from weft.training.optimizers.optimizer import Shared

NUM_STEPS = 4


def whole_step(module: nn.Module) -> Step:
    """Forward, loss, backward and the update with momentum."""
    rule = Momentum()

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        parameters = {name: tensor.detach().requires_grad_() for name, tensor in state["parameters"].items()}
        buffers = {name: tensor.clone() for name, tensor in state["buffers"].items()}
        with torch.enable_grad():
            predictions = functional_call(module, (parameters, buffers), tuple(batch["inputs"]))
            loss = cross_entropy(predictions, *batch["targets"])
            gradients = torch.autograd.grad(loss, list(parameters.values()))
        shared = Shared(torch.tensor(0.05, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64))
        updated = {
            name: rule.update_rule(gradient, tensor.detach(), {"velocity": state["velocity"][name]}, shared)
            for (name, tensor), gradient in zip(parameters.items(), gradients, strict=True)
        }
        velocity = {name: slots["velocity"] for name, (_, slots) in updated.items()}
        new = {"parameters": {name: value for name, (value, _) in updated.items()}, "buffers": buffers}
        return {"loss": loss.detach()}, {**new, "velocity": velocity}

    return step


def compute(node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return call_of(node)(*args, **kwargs)


def run(graph: Graph, state: Any, batch: Any, random: Tensor) -> tuple[float, Any, Tensor]:
    """One step, operator by operator: regions as the operators inside."""
    inputs = flatten_as(graph.arguments, {"state": state, "batch": batch}, len(graph.placeholders))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.set_rng_state(random)
        results = replay(graph.nodes, inputs, graph.constants.__getitem__, call=compute)[graph.nodes.output_node()]
        filled = unflatten(graph.results, results)
        return filled["outputs"]["loss"].item(), filled["state"], torch.get_rng_state()


@pytest.mark.parametrize("name", SUBJECTS)
def test_losses_are_those_of_eager_steps(name: str) -> None:
    task, build = SUBJECTS[name]
    module = build()
    eager = EagerExecutor(copy.deepcopy(module), cross_entropy)
    optimizer = OPTIMIZERS["momentum"](lr=0.05)
    theirs = eager.initial_state()
    slots = optimizer.init(theirs.parameters)
    state: Any = plain(copy.deepcopy(module))
    state["velocity"] = {key: torch.zeros_like(tensor) for key, tensor in state["parameters"].items()}
    random, graph = theirs.random, None
    for number in range(NUM_STEPS):
        batch = draw(task, number, num_samples=5)
        data = {"inputs": batch.inputs, "targets": batch.targets}
        if graph is None:
            graph = fuse(
                rewrite(capture(whole_step(module), state, data), reassociate=True, check_each=True), worth=always
            )
            check_shapes(graph)
            assert regions_of(graph)
        outputs, gradients, theirs = take(eager, theirs, batch)
        slots = optimizer.update(gradients, theirs.parameters, slots, 0.05)
        loss, state, random = run(graph, state, data, random)
        assert loss == pytest.approx(outputs.loss.item(), rel=1e-4)
