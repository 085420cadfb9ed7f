"""Adding, selecting, taking and merging: against plain sorts, loops and sums of exact numbers."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.distributed.codecs.kernels.checks import (
    IMPLEMENTATIONS,
    KINDS,
    SIZES,
    TYPES,
    Kernels,
    check_selection,
    make,
    same_bits,
)
from weft.distributed.codecs import kernels as chosen
from weft.distributed.codecs.kernels import definition, derive_key

implementations = pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
types = pytest.mark.parametrize("dtype", TYPES)


@implementations
@types
@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_are_those_of_a_sort(kernels: Kernels, dtype: torch.dtype, kind: str) -> None:
    for size in SIZES:
        for num in {0, min(1, size), size // 100, size // 3, max(size - 1, 0), size}:
            check_selection(kernels, make(kind, size, dtype), num)


def last_of_equals(kept: Tensor, message: Tensor | None, scale: float, num: int) -> Tensor:
    places = kept.numel() - 1 - definition.add_and_select(kept.flip(0), message, scale, num)
    return places.flip(0).to(torch.int32)


def by_value(kept: Tensor, message: Tensor | None, scale: float, num: int) -> Tensor:
    return kept.topk(num).indices.sort().values.to(torch.int32)


def numbers_only(kept: Tensor, message: Tensor | None, scale: float, num: int) -> Tensor:
    return definition.add_and_select(kept.nan_to_num(0.0), message, scale, num)


@pytest.mark.parametrize(
    ("broken", "kind"), [(last_of_equals, "tied"), (by_value, "normal"), (numbers_only, "strange")]
)
def test_a_wrong_selection_is_found(broken: object, kind: str) -> None:
    with pytest.raises(AssertionError, match="largest"):
        check_selection(SimpleNamespace(add_and_select=broken), make(kind, 200, torch.float32), 60)


@implementations
def test_a_sample_that_misleads_changes_nothing(kernels: Kernels) -> None:
    """Large numbers in a few runs, ascending, descending, and all of them where no sample is."""
    size, num = 300_000, 3000
    ramp = torch.arange(size, dtype=torch.float32)
    spikes = torch.zeros(size)
    spikes[100_000 : 100_000 + num] = ramp[1 : num + 1]
    for x in (ramp, ramp.flip(0), spikes, spikes + 1, -spikes - 1e-3 * (ramp % 7)):
        assert kernels.add_and_select(x.clone(), None, 1.0, num).equal(definition.add_and_select(x, None, 1.0, num))


@implementations
@types
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_that_of_its_equations(kernels: Kernels, dtype: torch.dtype, nesterov: bool) -> None:
    velocity, kept, message = (torch.tensor(v, dtype=dtype) for v in ([4.0, 8.0], [16.0, 32.0], [2.0, -6.0]))
    kernels.add_momentum(velocity, kept, message, 0.5, 0.25, nesterov)
    assert velocity.tolist() == ([1.25, 1.25] if nesterov else [2.0, -1.0])
    assert kept.tolist() == ([18.25, 30.25] if nesterov else [18.0, 31.0])


@implementations
@types
def test_selecting_adds_first(kernels: Kernels, dtype: torch.dtype) -> None:
    for velocity, nesterov in ((None, False), (make("normal", 999, dtype, 3), False), (make("tied", 999, dtype), True)):
        kept, message = make("normal", 999, dtype, 1), make("normal", 999, dtype, 2)
        expected, u = kept.clone(), None if velocity is None else velocity.clone()
        if u is None:
            kernels.add(expected, message, 0.3)
        else:
            kernels.add_momentum(u, expected, message, 0.3, 0.9, nesterov)
        found = kernels.add_and_select(kept, message, 0.3, 50, velocity=velocity, momentum=0.9, nesterov=nesterov)
        assert same_bits(kept, expected) and (velocity is None or u is None or same_bits(velocity, u))
        assert found.equal(kernels.add_and_select(expected, None, 1.0, 50))
        above = kernels.add_and_select_above(expected, None, 1.0, 1.5)
        assert above.equal((expected.abs() >= 1.5).nonzero().flatten().int())


@implementations
@types
def test_sum_and_product_are_rounded_one_by_one(kernels: Kernels, dtype: torch.dtype) -> None:
    """A fused multiply-add would keep the last bits of the product, and give something else than zero."""
    x = make("normal", 100, dtype)
    kept = -(x * torch.tensor(1 / 3, dtype=dtype))
    kernels.add(kept, x, 1 / 3)
    assert kept.abs().max() == 0


@implementations
def test_not_a_number_is_above_every_threshold(kernels: Kernels) -> None:
    x = torch.tensor([1.0, float("nan"), -3.0, float("inf"), 0.0])
    assert kernels.add_and_select_above(x, None, 1.0, float("inf")).tolist() == [1, 3]
    assert kernels.add_and_select_above(x, None, 1.0, 3.0).tolist() == [1, 2, 3]
    assert kernels.add_and_select_above(x, None, 1.0, 0.0).tolist() == [0, 1, 2, 3, 4]


@types
def test_an_estimated_threshold_selects_about_as_many(dtype: torch.dtype) -> None:
    kept, message, velocity = (make("normal", 400_000, dtype, seed) for seed in range(3))
    for extra in ({}, {"velocity": velocity, "momentum": 0.9, "nesterov": True}):
        before = kept.clone(), velocity.clone()
        threshold = chosen.estimate_threshold(kept, message, 0.5, 4000, derive_key(1), **extra)  # type: ignore[arg-type]
        assert kept.equal(before[0]) and velocity.equal(before[1])
        found = chosen.add_and_select_above(kept, message, 0.5, threshold, **extra)  # type: ignore[arg-type]
        assert 2800 < found.numel() < 5200


def test_an_estimate_of_all_elements_is_exact_and_never_asks_for_zeros() -> None:
    assert chosen.estimate_threshold(torch.tensor([3.0, -1.0, 2.0, 0.0]), None, 1.0, 2, 0) == 2.0
    assert chosen.estimate_threshold(torch.zeros(5), None, 1.0, 2, 0) == torch.finfo(torch.float32).tiny
    assert chosen.estimate_threshold(torch.full((5,), float("nan")), None, 1.0, 2, 0) == float("inf")


@implementations
@types
def test_what_is_taken_is_zero_and_can_be_put_back(kernels: Kernels, dtype: torch.dtype) -> None:
    kept, velocity = make("strange", 500, dtype), make("normal", 500, dtype, 1)
    before, u = kept.clone(), velocity.clone()
    places = kernels.add_and_select(kept, None, 1.0, 77)
    values = kernels.take(kept, places, velocity)
    assert same_bits(values, before[places.long()])
    rest = torch.ones(500, dtype=torch.bool)
    rest[places.long()] = False
    assert same_bits(kept, torch.where(rest, before, 0.0)) and same_bits(velocity, torch.where(rest, u, 0.0))
    kernels.scatter_add(kept, places, values)
    assert same_bits(kept[places.long()], before[places.long()])


@implementations
def test_places_that_come_twice_are_added_in_order(kernels: Kernels) -> None:
    dense = torch.zeros(3)
    kernels.scatter_add(dense, torch.tensor([1, 1, 1, 2], dtype=torch.int32), torch.tensor([1e8, 1.0, -1e8, 5.0]))
    assert dense.tolist() == [0.0, 0.0, 5.0]  # 1 is lost in 1e8; another order would keep it


streams = st.dictionaries(st.integers(0, 60), st.integers(-9, 9), max_size=40)


@implementations
@given(a=streams, b=streams)
def test_a_merge_is_the_sum(kernels: Kernels, a: dict[int, int], b: dict[int, int]) -> None:
    (places_a, values_a), (places_b, values_b) = sparse(a), sparse(b)
    places, values = kernels.merge(places_a, values_a, places_b, values_b)
    assert dict(zip(places.tolist(), values.tolist(), strict=True)) == {i: a.get(i, 0) + b.get(i, 0) for i in a | b}
    assert places.tolist() == sorted(a | b) and places.dtype == torch.int32


def sparse(stream: dict[int, int]) -> tuple[Tensor, Tensor]:
    places = sorted(stream)
    return torch.tensor(places, dtype=torch.int32), torch.tensor([float(stream[i]) for i in places])


@pytest.mark.parametrize("place", [-1, 5, 2**31 - 1, -(2**31)])
def test_a_place_outside_is_refused_and_nothing_is_added(place: int) -> None:
    dense = torch.zeros(5)
    with pytest.raises(ValueError, match="place outside"):
        chosen.scatter_add(dense, torch.tensor([0, place], dtype=torch.int32), torch.ones(2))
    assert dense.abs().max() == 0
    with pytest.raises(AssertionError):
        chosen.take(dense, torch.tensor([0, place], dtype=torch.int32))


@pytest.mark.parametrize("places", [[1, 1], [2, 1], [-1, 3]])
def test_a_stream_that_does_not_ascend_is_refused(places: list[int]) -> None:
    good, bad = torch.tensor([0, 1], dtype=torch.int32), torch.tensor(places, dtype=torch.int32)
    for first, second in ((good, bad), (bad, good)):
        with pytest.raises(ValueError, match="do not ascend"):
            chosen.merge(first, torch.ones(2), second, torch.ones(2))


def test_a_stream_without_all_its_values_is_refused() -> None:
    with pytest.raises(ValueError, match="a value for each place"):
        chosen.scatter_add(torch.zeros(5), torch.tensor([0, 1], dtype=torch.int32), torch.ones(3))


def test_a_tensor_of_the_wrong_type_or_size_is_a_bug() -> None:
    for kept, message in ((torch.zeros(3), torch.zeros(4)), (torch.zeros(3), torch.zeros(3).double())):
        with pytest.raises(AssertionError):
            chosen.add(kept, message, 1.0)
    with pytest.raises(AssertionError):
        chosen.add(torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16), 1.0)
    with pytest.raises(AssertionError):
        chosen.add_and_select(torch.zeros(3), None, 1.0, 4)
