"""Which tensor is named when a step is not finite."""

import torch
from torch import Tensor, nn

from weft.graph import EagerExecutor
from weft.graph.executors.non_finite import first_bad_in_forward, first_bad_of, is_finite
from weft.specs import Batch

BATCH = Batch((torch.ones(4, 3),), (torch.zeros(4, 3),))


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.log()


class LogOfLayer(nn.Module):
    """Fails in its own forward, behind a layer that is fine."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).square() - 1e6).log()  # type: ignore[no-any-return]


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, list[Tensor]]]:
        return x, {"memory": [x, x / 0]}


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()

    def forward(self, x: Tensor) -> Tensor:
        return self.pair(x)[0]  # type: ignore[no-any-return]


def filled(weight: float = 1.0, bias: float = 0.0) -> nn.Linear:
    layer = nn.Linear(3, 3)
    nn.init.constant_(layer.weight, weight)
    nn.init.constant_(layer.bias, bias)
    return layer


def test_layer_whose_output_is_the_first_bad_one() -> None:
    module = nn.Sequential(filled(weight=-1.0), Log(), nn.Linear(3, 3))
    assert first_bad_in_forward(module, BATCH) == "output of 1"


def test_module_that_fails_in_its_own_forward() -> None:
    assert first_bad_in_forward(LogOfLayer(), BATCH) == "output of LogOfLayer"
    assert first_bad_in_forward(nn.Sequential(nn.Linear(3, 3), LogOfLayer()), BATCH) == "output of 1"


def test_bad_tensor_inside_a_nested_output() -> None:
    assert first_bad_in_forward(First(), BATCH) == "output of pair"


def test_parameter_comes_before_the_output_it_spoils() -> None:
    module = nn.Sequential(nn.Linear(3, 3), filled(bias=torch.nan))
    assert first_bad_in_forward(module, BATCH) == "parameter 1.bias"


def test_overflow_is_blamed_on_its_layer_not_on_statistics_that_it_spoiled() -> None:
    module = nn.Sequential(filled(weight=3e38), nn.BatchNorm1d(3))
    executor = EagerExecutor(module, nn.functional.mse_loss)
    outputs, state = executor(executor.initial_state(), BATCH, lambda *_: None)
    assert not is_finite(outputs.loss) and not is_finite(state.buffers["1.running_mean"])
    assert executor.first_bad_tensor(state, BATCH) == "output of 0"


def test_search_for_a_bad_tensor_leaves_no_hooks() -> None:
    module = nn.Sequential(nn.Linear(3, 3), Log())
    first_bad_in_forward(module, BATCH)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_first_bad_tensor_is_in_the_order_of_the_mapping() -> None:
    tensors = {"fine": torch.ones(2), "b": torch.tensor([1.0, torch.inf]), "a": torch.tensor(torch.nan)}
    assert first_bad_of("parameter", tensors) == "parameter b"
    assert first_bad_of("parameter", {"fine": torch.ones(2), "whole numbers": torch.tensor([2**62])}) is None


def test_every_type_can_be_judged() -> None:
    assert all(is_finite(torch.ones(2, dtype=t)) for t in (torch.bool, torch.uint8, torch.bfloat16, torch.complex64))
    assert not is_finite(torch.tensor(complex(0, torch.nan)))
    assert is_finite(torch.empty(0))
