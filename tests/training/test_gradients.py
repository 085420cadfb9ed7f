"""Micro-batches, clipping, and gradients taken at another point."""

from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from weft.graph import AbstractExecutor, EagerExecutor, ReferenceExecutor, State
from weft.specs import Batch
from weft.training.gradients import Gradients, clip_by_norm, gradients_of, use_point

Compute = Callable[[AbstractExecutor, State, Batch, int], tuple[float, Gradients, State]]


def compute(executor: AbstractExecutor, state: State, batch: Batch, num_pieces: int) -> tuple[float, Gradients, State]:
    gradients: dict[str, Tensor | None] = {}
    loss, after = gradients_of(executor, state, batch, num_pieces, gradients.__setitem__)
    return loss, gradients, after


def mlp() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def batch_of(size: int) -> Batch:
    generator = torch.Generator().manual_seed(size)
    return Batch((torch.randn(size, 3, generator=generator),), (torch.randn(size, 2, generator=generator),))


def check_pieces(compute: Compute, size: int, num_pieces: int) -> None:
    """Whatever the number of pieces, the result is that of the whole batch."""
    executor = ReferenceExecutor(mlp(), nn.functional.mse_loss)
    state, batch = executor.initial_state(), batch_of(size)
    whole_loss, whole, state = compute(executor, state, batch, 1)
    loss, found, _ = compute(executor, state, batch, num_pieces)
    assert abs(loss - whole_loss) < 1e-12
    assert found.keys() == whole.keys()
    for name, gradient in whole.items():
        assert gradient is not None
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)


@given(size=st.integers(1, 9), num_pieces=st.integers(1, 12))
def test_pieces_give_the_whole(size: int, num_pieces: int) -> None:
    check_pieces(compute, size, num_pieces)


def test_a_plain_mean_over_ragged_pieces_is_caught() -> None:
    def plain_mean(
        executor: AbstractExecutor, state: State, batch: Batch, num_pieces: int
    ) -> tuple[float, Gradients, State]:
        total, gradients = 0.0, dict[str, Tensor]()
        pieces = batch.split(num_pieces)
        for piece in pieces:
            loss, found, state = compute(executor, state, piece, 1)
            total += loss / len(pieces)
            for name, gradient in found.items():
                assert gradient is not None
                gradients[name] = gradients.get(name, 0.0) + gradient / len(pieces)
        return total, gradients, state

    check_pieces(plain_mean, 8, 4)  # equal pieces: it is right by luck
    with pytest.raises(AssertionError):
        check_pieces(plain_mean, 9, 4)


def test_whole_numbers_are_exact() -> None:
    layer = nn.Linear(2, 1, bias=False)
    nn.init.constant_(layer.weight, 3.0)
    executor = EagerExecutor(layer.double(), lambda predictions, targets: (predictions * targets).mean())
    inputs = torch.arange(16, dtype=torch.float64).view(8, 2)
    batch = Batch((inputs,), (torch.arange(8, dtype=torch.float64).unsqueeze(1),))
    whole_loss, whole, _ = compute(executor, executor.initial_state(), batch, 1)
    for num_pieces in (2, 4, 8):
        loss, found, _ = compute(executor, executor.initial_state(), batch, num_pieces)
        assert loss == whole_loss and torch.equal(found["weight"], whole["weight"])  # type: ignore[arg-type]


def test_pieces_weigh_by_their_targets_where_some_are_padding() -> None:
    layer = nn.Linear(2, 3)
    executor = EagerExecutor(layer.double(), lambda p, t: nn.functional.cross_entropy(p.flatten(0, 1), t.flatten()))
    inputs = torch.randn(4, 3, 2, dtype=torch.float64)
    targets = torch.tensor([[0, 1, 2], [1, 1, 0], [2, -100, -100], [0, -100, -100]])
    whole_loss, whole, state = compute(executor, executor.initial_state(), Batch((inputs,), (targets,)), 1)
    loss, found, _ = compute(executor, state, Batch((inputs,), (targets,)), 2)
    assert abs(loss - whole_loss) < 1e-12
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)


def test_the_sink_hears_each_gradient_once_during_the_last_backward() -> None:
    log: list[str] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            hidden.register_hook(lambda _: log.append("between"))
            return self.last(hidden)  # type: ignore[no-any-return]

    executor = EagerExecutor(Watched(), nn.functional.mse_loss)
    gradients_of(executor, executor.initial_state(), batch_of(6), 3, lambda name, _: log.append(name))
    assert log[:2] == ["between", "between"]
    assert sorted(log[2:4]) == ["last.bias", "last.weight"]
    assert log[4] == "between" and sorted(log[5:]) == ["first.bias", "first.weight"]


def test_gradients_that_autograd_made_of_one_memory_are_weighed_once() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tall, self.wide = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2, 3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.tall.view(6) + self.wide.view(6)) * x.mean(0)

    executor = EagerExecutor(Views(), lambda predictions, targets: predictions.sum())
    batch = Batch((torch.ones(4, 6),), (torch.ones(4, 6),))
    _, found, _ = compute(executor, executor.initial_state(), batch, 2)
    for gradient in found.values():
        assert gradient is not None and torch.equal(gradient.flatten(), torch.ones(6))


def test_parameter_that_only_some_pieces_use() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.never = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(1.0))
            self.always = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.always
            return y * self.gate if x.sum() > 0 else y

    executor = EagerExecutor(Gated(), lambda predictions, targets: predictions.mean())
    for inputs in ([1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]):
        batch = Batch((torch.tensor(inputs),), (torch.zeros(4),))
        _, found, _ = compute(executor, executor.initial_state(), batch, 2)
        assert found["never"] is None
        assert found["gate"] is not None and found["gate"].item() == 0.5
        assert found["always"] is not None and found["always"].item() == 1.0


def test_each_piece_draws_from_the_state_the_one_before_left() -> None:
    executor = EagerExecutor(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), nn.functional.mse_loss)
    state, (first, second) = executor.initial_state(), batch_of(8).split(2)
    after_both = compute(executor, compute(executor, state, first, 1)[2], second, 1)[2]
    assert not torch.equal(after_both.random, state.random)
    assert torch.equal(compute(executor, state, batch_of(8), 2)[2].random, after_both.random)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("limit", [1e-3, 0.5, 1.0, 3.0, 1e6])
def test_clipping_has_the_bits_of_torch(dtype: torch.dtype, limit: float) -> None:
    gradients: dict[str, Tensor | None] = {
        "a": torch.randn(7, 5, dtype=dtype),
        "none": None,
        "b": torch.randn((), dtype=dtype),
        "c": torch.randn(33, dtype=dtype),
    }
    parameters = {name: nn.Parameter(torch.zeros_like(g)) for name, g in gradients.items() if g is not None}
    before = {name: g.clone() for name, g in gradients.items() if g is not None}
    for name, parameter in parameters.items():
        parameter.grad = before[name].clone()
    torch.nn.utils.clip_grad_norm_(parameters.values(), limit)
    clipped = clip_by_norm(gradients, limit)
    assert clipped["none"] is None and clipped.keys() == gradients.keys()
    assert all(torch.equal(clipped[name], p.grad) for name, p in parameters.items())  # type: ignore[arg-type]
    assert all(torch.equal(gradients[name], g) for name, g in before.items())  # type: ignore[arg-type]


def test_clipping_nothing() -> None:
    assert clip_by_norm({}, 1.0) == {}
    assert clip_by_norm({"none": None}, 1.0) == {"none": None}


def parameters_at(value: float) -> dict[str, Tensor]:
    return {"a": torch.full((2,), value), "b": nn.Parameter(torch.tensor(value))}


def are_at(parameters: Mapping[str, Tensor], value: float) -> bool:
    return all(bool((parameter == value).all()) for parameter in parameters.values())


def test_point_is_held_and_left() -> None:
    parameters = parameters_at(1.0)
    with use_point(parameters, parameters_at(2.0)):
        assert are_at(parameters, 2.0)
    assert are_at(parameters, 1.0)


def test_point_is_left_when_the_gradient_fails() -> None:
    parameters = parameters_at(1.0)
    with pytest.raises(LookupError), use_point(parameters, parameters_at(2.0)):
        raise LookupError
    assert are_at(parameters, 1.0)


def test_point_that_is_home_copies_nothing() -> None:
    parameters = parameters_at(1.0)
    with use_point(parameters, parameters):
        parameters["a"].fill_(3.0)
    assert parameters["a"].tolist() == [3.0, 3.0]
