"""Models of Hugging Face transformers through the graph: captured, rewritten, to the bit what eager mode computes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.graph.contract import clone, take
from tests.graph.executors.test_built_in_models import assert_bits
from weft.graph import EagerExecutor, GraphExecutor, Program, capture, rewrite, training_step
from weft.specs import Batch

transformers = pytest.importorskip("transformers")


class Logits(nn.Module):
    """A model as a function of one tensor; transformers return objects."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs).logits  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    return Logits(transformers.GPT2LMHeadModel(config))


def bert() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return Logits(
        transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=40, max_position_embeddings=16, **sizes))
    )


def vit() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(image_size=16, patch_size=8, num_channels=1, num_labels=5, **sizes)
    return Logits(transformers.ViTForImageClassification(config))


def words(seed: int) -> Batch:
    tokens = torch.randint(40, (3, 13), generator=torch.Generator().manual_seed(seed))
    return Batch((tokens[:, :-1].contiguous(),), (tokens[:, 1:].contiguous(),))


def pictures(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, (3,), generator=generator)
    return Batch((torch.randn(3, 1, 16, 16, generator=generator),), (labels,))


def cross_entropy(predictions: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(predictions.flatten(0, -2), targets.flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "gpt2": (gpt2, words),
    "bert": (bert, words),
    "vit": (vit, pictures),
}


@pytest.mark.parametrize("name", MODELS)
def test_training_steps_have_the_bits_of_eager(name: str) -> None:
    """With dropout, as the models come."""
    build, draw = MODELS[name]
    module = build()
    executors = EagerExecutor(module, cross_entropy), GraphExecutor(copy.deepcopy(module), cross_entropy)
    states = [executor.initial_state() for executor in executors]
    for step in range(3):
        found: list[Any] = []
        for i, executor in enumerate(executors):
            outputs, gradients, states[i] = take(executor, states[i], draw(step))
            found.append(clone((outputs, gradients, states[i].buffers)))
            descend(states[i].parameters, gradients)
        assert_bits(found[1], found[0])
    assert_bits(executors[1].infer(states[1], draw(9)), executors[0].infer(states[0], draw(9)))


@torch.no_grad()
def descend(parameters: Any, gradients: Any) -> None:
    for name, gradient in gradients.items():
        if gradient is not None:
            parameters[name].sub_(gradient, alpha=0.1)


@pytest.mark.parametrize("name", MODELS)
def test_rewrites_take_operators_out(name: str) -> None:
    build, draw = MODELS[name]
    module, batch = build(), draw(0)
    state = {
        "parameters": {name: p.detach() for name, p in module.named_parameters()},
        "buffers": dict(module.named_buffers()),
    }
    data = {"inputs": batch.inputs, "targets": batch.targets}
    graph = capture(training_step(module.train(), cross_entropy), state, data)
    short = rewrite(graph)
    assert len(short.operators) < len(graph.operators)
    random = torch.get_rng_state()
    found, expected = (Program(one)(state, data, random)[0]["loss"] for one in (short, graph))
    assert torch.equal(found, expected)
