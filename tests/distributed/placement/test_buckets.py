"""Buckets: every parameter once, in backward's order, small ones packed by type, large ones alone."""

from itertools import zip_longest

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from weft.distributed.placement.buckets import PACKED_BYTES, plan_buckets

DTYPES = [torch.float32, torch.float64, torch.bfloat16]

models = st.lists(st.tuples(st.integers(0, 60), st.sampled_from(DTYPES)), max_size=12).map(
    lambda sizes: {f"p{i}": torch.empty(size, dtype=dtype) for i, (size, dtype) in enumerate(sizes)}
)


@given(parameters=models, packed_bytes=st.integers(1, 200))
def test_each_parameter_is_in_one_bucket_in_reverse_order(parameters: dict[str, Tensor], packed_bytes: int) -> None:
    buckets = plan_buckets(parameters, packed_bytes)
    assert [name for bucket in buckets for name in bucket.names] == list(reversed(parameters))
    for bucket in buckets:
        assert bucket.num_elements == sum(parameters[name].numel() for name in bucket.names)


@given(parameters=models, packed_bytes=st.integers(1, 200))
def test_a_packed_bucket_has_one_type_and_is_about_full(parameters: dict[str, Tensor], packed_bytes: int) -> None:
    buckets = plan_buckets(parameters, packed_bytes)
    for bucket, following in zip_longest(buckets, buckets[1:]):
        sizes = [parameters[name].nbytes for name in bucket.names]
        assert len({parameters[name].dtype for name in bucket.names}) == 1
        if len(sizes) > 1:
            # Closed by its last tensor at the latest, and none of them would have travelled alone.
            assert sum(sizes[:-1]) < packed_bytes
            assert max(sizes) < packed_bytes
        if following is not None and sum(sizes) < packed_bytes:
            after = parameters[following.names[0]]
            assert after.nbytes >= packed_bytes or after.dtype != parameters[bucket.names[0]].dtype


def test_the_picture_of_a_small_model() -> None:
    # The drawing at the head of the module.
    wide = PACKED_BYTES // 4
    shapes = {"w1": 4 * wide, "b1": 1000, "w2": 4 * wide, "b2": 1000, "w3": 10_000, "b3": 10}
    parameters = {name: torch.empty(size, device="meta") for name, size in shapes.items()}
    assert [bucket.names for bucket in plan_buckets(parameters)] == [("b3", "w3", "b2"), ("w2",), ("b1",), ("w1",)]


def test_a_small_network_is_one_message() -> None:
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    (bucket,) = plan_buckets(dict(network.named_parameters()))
    assert bucket.names == ("2.bias", "2.weight", "0.bias", "0.weight")
    assert bucket.num_elements == 64 * 128 + 128 + 128 * 10 + 10


def test_no_parameters_need_no_bucket() -> None:
    assert plan_buckets({}) == ()
