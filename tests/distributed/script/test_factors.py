"""`compress=factors` under a script's own loop and optimizer: the weights of one process, whatever the loop does."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.distributed.script.loops import apart, data_of, make_model, train
from tests.distributed.script.virtual_script import run_script
from weft.distributed.placement.factors import layers as module
from weft.distributed.placement.factors.exchange import FactorExchange
from weft.distributed.script.weaving.blocks import no_sync
from weft.distributed.script.weaving.weave import weave
from weft.planning.factor_cost import FactoredShape

PLAN = "data compress=factors"


@pytest.fixture(autouse=True)
def small_layers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Weights that are sent as rows, in the order in which ranks send them."""
    monkeypatch.setattr(module, "LEAST_BYTES", 0)
    monkeypatch.setattr(FactoredShape, "sends_factors", lambda self, num_rows: True)
    sent: list[str] = []
    right = FactorExchange.start

    def noting(self: FactorExchange, name: str, weight: float) -> Any:
        sent.append(name)
        return right(self, name, weight)

    monkeypatch.setattr(FactorExchange, "start", noting)
    return sent


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)


def clip(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def sum_of_squares(found: Tensor, wanted: Tensor) -> Tensor:
    return (found - wanted).square().sum()


LOOPS: dict[str, Callable[[], list[float]]] = {
    "plain": train,
    "ragged": partial(train, 17),
    "accumulated": partial(train, 22, accumulate=3, optimizer=sgd),
    "clipped": partial(train, 22, change=clip, optimizer=sgd),
    "summed": partial(train, 17, accumulate=2, loss_of=sum_of_squares, loss="sum", optimizer=sgd),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", LOOPS)
def test_one_process_gives_the_same(name: str, size: int, small_layers: list[str]) -> None:
    found, alone = run_script(LOOPS[name], size, PLAN), LOOPS[name]()
    assert all(other == found[0] for other in found)
    assert apart(found[0], alone) < 1e-5
    assert set(small_layers) == {"0.weight", "2.weight"}


Step = Callable[[nn.Module, Tensor, Tensor], None]


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def retained(model: nn.Module, x: Tensor, y: Tensor) -> None:
    loss = mse(model, x, y)
    loss.backward(retain_graph=True)
    (0.5 * loss).backward()


def two_graphs(model: nn.Module, x: Tensor, y: Tensor) -> None:
    first, second = mse(model, x, y), mse(model, 2 * x, y)
    first.backward()
    second.backward()


def penalised(model: nn.Module, x: Tensor, y: Tensor) -> None:
    (mse(model, x, y) + 0.1 * model.get_parameter("0.weight").square().sum()).backward()


def checkpointed(model: nn.Module, x: Tensor, y: Tensor) -> None:
    nn.functional.mse_loss(checkpoint(model, x, use_reentrant=False), y).backward()


def reentrant(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Its forward runs again in backward, when the numbers of rows have been told."""
    found = checkpoint(model, x.clone().requires_grad_(), use_reentrant=True)
    nn.functional.mse_loss(found, y).backward()


def held(model: nn.Module, x: Tensor, y: Tensor) -> None:
    with no_sync():
        mse(model, 2 * x, y).backward()
    mse(model, x, y).backward()


def slope(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """A penalty on the gradient by the input."""
    x = x.clone().requires_grad_()
    loss = mse(model, x, y)
    (by_input,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + by_input.square().sum(1).mean()).backward()


def hooked(model: nn.Module, x: Tensor, y: Tensor) -> None:
    handle = model.get_parameter("2.weight").register_hook(lambda gradient: 0.5 * gradient)
    mse(model, x, y).backward()
    handle.remove()


def autocast(model: nn.Module, x: Tensor, y: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = mse(model, x, y)
    loss.backward()


def one_layer(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Backward calls that leave a layer out."""
    mse(model, x, y).backward(inputs=[model.get_parameter("0.weight")])
    mse(model, x, y).backward()


STEPS: list[Step] = [
    retained,
    two_graphs,
    penalised,
    checkpointed,
    reentrant,
    held,
    slope,
    hooked,
    one_layer,
    autocast,
]


def loop(step: Step, num_samples: int = 16) -> list[float]:
    model = make_model()
    model, optimizer, loader = weave(model, sgd(model), DataLoader(data_of(num_samples), 8))
    for x, y in loader:
        optimizer.zero_grad()
        step(model, x, y)
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).tolist()


@pytest.mark.parametrize("step", STEPS)
def test_whatever_a_backward_does(step: Step) -> None:
    script = partial(loop, step)
    found, alone = run_script(script, 2, PLAN), script()
    assert found[0] == found[1]
    # A penalty on the input's gradient is one of means over shares, and rounding to bfloat16 is of shares too.
    dense = run_script(script, 2, "data")[0]
    assert apart(found[0], dense) < 1e-5
    assert apart(found[0], alone) < (1e-5 if step not in (slope, autocast) else 0.1)


def two_models() -> list[float]:
    models = [make_model(), make_model(6)]
    optimizers = [sgd(model) for model in models]
    woven, steps, loader = weave(models, optimizers, DataLoader(data_of(16), 8))
    for x, y in loader:
        for model, optimizer in zip(woven, steps, strict=True):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
    return [p for model in models for p in nn.utils.parameters_to_vector(model.parameters()).tolist()]


def test_every_model_has_rows_of_its_own(small_layers: list[str]) -> None:
    found = run_script(two_models, 2, PLAN)
    assert found[0] == found[1]
    assert apart(found[0], two_models()) < 1e-5
    assert len(set(small_layers)) == 4


def test_gradients_that_a_script_keeps_are_not_written_to() -> None:
    def script() -> list[float]:
        model = make_model()
        model, optimizer, loader = weave(model, sgd(model), DataLoader(data_of(16), 8))
        kept: list[Any] = []
        for x, y in loader:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            kept.append(model.get_parameter("0.weight").grad)
        return [float(tensor.sum()) for tensor in kept]

    assert apart(run_script(script, 2, PLAN)[0], script()) < 1e-5


def test_a_copy_of_a_woven_model_is_plain() -> None:
    def script() -> bool:
        model = make_model()
        model, _, loader = weave(model, sgd(model), DataLoader(data_of(16), 8))
        copied = copy.deepcopy(model)
        x, y = next(iter(loader))
        mse(copied, x, y).backward()
        return copied[0].weight.grad is not None and model[0].weight.grad is None

    assert run_script(script, 2, PLAN) == [True, True]


class Transposed(nn.Module):
    """Layers as Hugging Face's GPT-2 has them, over positions."""

    def __init__(self) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.up, self.down = Conv1D(12, 5), Conv1D(1, 12)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(torch.stack((x, -x), 1)).tanh()).mean(1)
        return y


def test_layers_of_hugging_face(small_layers: list[str]) -> None:
    def script() -> list[float]:
        torch.manual_seed(5)
        model = Transposed()
        model, optimizer, loader = weave(model, sgd(model), DataLoader(data_of(16), 8))
        for x, y in loader:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).tolist()

    found = run_script(script, 2, PLAN)
    assert found[0] == found[1]
    assert apart(found[0], script()) < 1e-5
    assert set(small_layers) == {"up.weight", "down.weight"}
