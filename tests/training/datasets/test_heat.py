"""The heat equation, against an independent solver."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from weft.errors import UsageError
from weft.training.datasets.heat import heat, random_amplitudes, temperature


def finite_differences(field: Tensor, time: float, num_steps: int) -> Tensor:
    """Explicit Euler in time and the five-point stencil in space, in float64, zero on the edge."""
    spacing = 1 / (field.shape[-1] + 1)
    for _ in range(num_steps):
        padded = torch.nn.functional.pad(field, (1, 1, 1, 1))
        around = padded[:, 2:, 1:-1] + padded[:, :-2, 1:-1] + padded[:, 1:-1, 2:] + padded[:, 1:-1, :-2]
        field = field + time / num_steps * (around - 4 * field) / spacing**2
    return field


def error_on(grid: int, time: float = 0.01) -> float:
    amplitudes = random_amplitudes(2, seed=1)
    num_steps = round(time * 5 * (grid + 1) ** 2)  # a step of a fifth of the squared spacing: stable below a quarter
    solved = finite_differences(temperature(amplitudes, grid, 0.0), time, num_steps)
    return float((solved - temperature(amplitudes, grid, time)).abs().max())


def test_finite_differences_converge_to_the_exact_solution_with_second_order() -> None:
    errors = [error_on(grid) for grid in (19, 39, 79)]  # the spacing halves: 1/20, 1/40, 1/80
    assert errors[2] < 1e-3
    for coarse, fine in pairwise(errors):
        assert 3.6 < coarse / fine < 4.4


def test_one_mode_fades_as_the_formula_says() -> None:
    amplitudes = torch.zeros(1, 4, 4, dtype=torch.float64)
    amplitudes[0, 0, 1] = 1.0  # j = 1, k = 2
    start, later = (temperature(amplitudes, grid=3, time=time) for time in (0.0, 0.02))
    assert start[0, 1, 0].item() == pytest.approx(1.0)  # sin(pi / 2) sin(2 pi / 4)
    torch.testing.assert_close(later, start * torch.exp(torch.tensor(-5 * torch.pi**2 * 0.02)).item())


def test_the_data_set_pairs_a_field_with_its_later_self() -> None:
    splits = heat(num_samples=20, grid=6, time=0.02)
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [16, 2, 2]
    assert splits.task.input.shape == (1, 6, 6) and splits.task.num_outputs == 36
    batch = splits.train.take(torch.arange(16))
    exact = temperature(random_amplitudes(20, seed=0)[:16], 6, 0.02)
    torch.testing.assert_close(batch.targets[0], exact.flatten(1).float())
    assert batch.inputs[0].dtype == torch.float32 and 0.2 < float(batch.inputs[0].std()) < 2


def test_without_time_nothing_changes() -> None:
    batch = heat(num_samples=10, grid=4, time=0.0).test.take(torch.tensor([0]))
    assert torch.equal(batch.inputs[0].flatten(1), batch.targets[0])


def test_the_seed_names_the_data() -> None:
    def checksum(seed: int) -> str:
        return heat(num_samples=10, grid=4, seed=seed).checksum()

    assert checksum(0) == checksum(0) != checksum(1)


def test_more_samples_begin_with_the_same_ones() -> None:
    assert torch.equal(random_amplitudes(9, seed=0)[:4], random_amplitudes(4, seed=0))


@pytest.mark.parametrize("wrong", [{"num_samples": 0}, {"num_samples": 5}, {"grid": 0}, {"time": -1.0}])
def test_impossible_problems_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        heat(**wrong)  # type: ignore[arg-type]
