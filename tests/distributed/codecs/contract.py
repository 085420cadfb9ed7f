"""The contract of a codec, as checks that raise AssertionError; every codec passes them, and broken ones do not."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from weft.distributed.codecs import AbstractCodec, Bucket, ReductionWork, bucket_of
from weft.distributed.collectives import AlgorithmChoice
from weft.distributed.group import AbstractGroup
from weft.distributed.group.solo import SoloGroup
from weft.distributed.virtual import run_virtual
from weft.errors import EncodingError

__all__ = ["CHECKS", "MakeCodec", "make_message"]

MakeCodec = Callable[[], AbstractCodec]
SIZE = 3


def make_bucket(dtype: torch.dtype = torch.float32) -> Bucket:
    return bucket_of({"w": torch.zeros(4, 5, dtype=dtype), "b": torch.zeros(3, dtype=dtype)})


def make_message(bucket: Bucket, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(bucket.num_elements, generator=generator, dtype=torch.float64).to(bucket.dtype)


def check_neither_end_changes_what_it_is_given(make: MakeCodec) -> None:
    codec, bucket = make(), make_bucket()
    message = make_message(bucket)
    before = message.clone()
    sent = codec.encode(bucket, message)
    assert torch.equal(message, before)
    kept = sent.clone()
    if _decodes(codec):
        codec.decode(bucket, sent)
    assert torch.equal(sent, kept)


def check_what_is_decoded_is_a_message(make: MakeCodec) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        bucket = make_bucket(dtype)
        if not (dtype.is_floating_point or make().is_dense):  # whole numbers have no part that could be kept back
            continue
        codec = make()
        if not _decodes(codec):
            continue
        sent = codec.encode(bucket, make_message(bucket), codec.make_memory(bucket, torch_empty))
        decoded = codec.decode(bucket, sent)
        assert bucket.accepts(decoded) and decoded.device == sent.device
        place = torch.full((bucket.num_elements,), 7, dtype=dtype)
        assert codec.decode(bucket, sent, place) is place
        assert torch.equal(place, decoded.view(-1))


def check_two_ranks_encode_alike(make: MakeCodec) -> None:
    bucket = make_bucket()
    message = make_message(bucket)
    assert torch.equal(make().encode(bucket, message), make().encode(bucket, message))


def check_rounding_twice_is_rounding_once(make: MakeCodec) -> None:
    if not make().carries_weights:
        return
    codec, bucket = make(), make_bucket()
    sent = codec.encode(bucket, make_message(bucket)).clone()
    assert torch.equal(codec.encode(bucket, codec.decode(bucket, sent)), sent)


def check_all_ranks_have_the_same_sum(make: MakeCodec) -> None:
    """That of what each decodes by itself; rounded once more where the group added it up."""
    bucket, plain = make_bucket(), make()

    def program(group: AbstractGroup) -> Tensor:
        codec, message = make(), make_message(bucket, group.rank)
        sent = codec.encode(bucket, message, codec.make_memory(bucket, group.empty))
        return ReductionWork(group, codec.reduce(bucket, sent, group, out=message)).wait()

    found = run_virtual(program, SIZE, choice=AlgorithmChoice("direct")).results
    if not _decodes(plain):
        assert all(torch.equal(one, found[0]) for one in found)
        return
    parts = [_decoded(make(), bucket, make_message(bucket, rank)) for rank in range(SIZE)]
    total = (parts[0] + parts[1]) + parts[2]
    if plain.is_dense:
        total = total.to(plain.encode(bucket, total).dtype).to(bucket.dtype)
    assert all(torch.equal(one, total) for one in found)


def check_what_is_not_sent_is_kept(make: MakeCodec) -> None:
    """Sent and kept together are what was given, over several messages, up to the rounding of a few additions."""
    codec, bucket = make(), make_bucket()
    given, sent = torch.zeros(bucket.num_elements), torch.zeros(bucket.num_elements)
    for step in range(4):
        message = make_message(bucket, step)
        given += message
        sent += _alone(codec, bucket, message)
    kept = _residual_of(codec, bucket)
    if kept is not None:
        torch.testing.assert_close(sent + kept, given, rtol=0, atol=1e-5)
    elif codec.carries_weights:
        torch.testing.assert_close(sent, given, rtol=0, atol=0.1)


def check_sent_and_kept_are_exact_in_float64(make: MakeCodec) -> None:
    """Small whole numbers in float64: no addition rounds, so nothing may be lost at all."""
    codec, bucket = make(), make_bucket(torch.float64)
    if _keeps_residual(make):
        given = sent = torch.zeros(bucket.num_elements, dtype=torch.float64)
        for step in range(6):
            message = (16 * make_message(bucket, step)).round()
            given, sent = given + message, sent + _alone(codec, bucket, message)
        kept = _residual_of(codec, bucket)
        assert kept is not None
        torch.testing.assert_close(sent + kept, given, rtol=0, atol=1e-12)


def check_scale_is_that_of_the_message(make: MakeCodec) -> None:
    bucket = make_bucket()
    message = make_message(bucket)
    one, other = make().encode(bucket, message, scale=0.25), make().encode(bucket, 0.25 * message)
    assert torch.equal(one, other)


def check_memory_goes_on(make: MakeCodec) -> None:
    codec, other, bucket = make(), make(), make_bucket()
    codec.encode(bucket, make_message(bucket, 0))
    other.remember({name: kept.tensor.clone() for name, kept in codec.memory().items()})
    following = make_message(bucket, 1)
    assert torch.equal(codec.encode(bucket, following), other.encode(bucket, following))
    codec.remember({})
    assert torch.equal(codec.encode(bucket, following), make().encode(bucket, following))


def check_cost_is_what_is_counted(make: MakeCodec) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16):
        codec, bucket = make(), make_bucket(dtype)
        cost, sent = codec.cost(bucket), codec.encode(bucket, make_message(bucket))
        assert math.isnan(cost.sent_bytes) or not _decodes(codec) or cost.sent_bytes == sent.nbytes
        kept = {name: kept for name, kept in codec.memory().items() if kept.tensor.dim()}
        assert cost.memory_bytes == sum(one.tensor.nbytes for one in kept.values())


def check_finite_stays_finite(make: MakeCodec) -> None:
    codec, bucket = make(), make_bucket()
    for largest in (6e4, 7e4, 3.4e38):
        message = make_message(bucket)
        message[21] = largest
        try:
            decoded = _alone(codec, bucket, message)
        except EncodingError as error:
            assert error.name == "b" and "use compress=" in str(error)
        else:
            assert decoded.isfinite().all()


def check_what_is_not_finite_shows_in_one_step(make: MakeCodec) -> None:
    """Of many numbers, more than a message has room for."""
    codec, bucket = make(), make_bucket()
    message = make_message(bucket)
    message[::2] = math.inf
    assert not _alone(codec, bucket, message).isfinite().all()
    for step in range(30):
        assert _alone(codec, bucket, make_message(bucket, step)).isfinite().all()


def check_what_waits_is_known(make: MakeCodec) -> None:
    codec, bucket = make(), make_bucket()
    assert not any(codec.is_waiting(name) for name in bucket.names)
    _alone(codec, bucket, make_message(bucket))
    waiting = {name for name, kept in codec.memory().items() if kept.kind == "sum" and kept.tensor.any()}
    assert {name for name in bucket.names if codec.is_waiting(name)} == {name.partition("/")[2] for name in waiting}


def check_nothing_is_an_empty_message(make: MakeCodec) -> None:
    """The part of a rank that owns nothing of a bucket, and a tensor without elements beside one that has some."""
    for tensors in ({}, {"w": torch.zeros(0)}, {"w": torch.zeros(0), "b": torch.zeros(3)}):
        bucket = bucket_of(tensors) if tensors else Bucket((), (), torch.float32)
        for _ in range(2):
            message = make_message(bucket)
            assert _alone(make(), bucket, message).shape == message.shape
        if _decodes(make()) and not bucket.num_elements:
            codec = make()
            assert codec.decode(bucket, codec.encode(bucket, message)).numel() == 0


def check_the_default_type_of_a_script_changes_nothing(make: MakeCodec) -> None:
    bucket, found = make_bucket(), list[Tensor]()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            codec = make()
            found.append(torch.cat([_alone(codec, bucket, make_message(bucket, step)) for step in range(3)]))
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(torch.equal(one, found[0]) for one in found)


def check_buckets_that_are_sent_unequally_often_go_on(make: MakeCodec) -> None:
    """As of two models, of which one has more steps."""
    seldom, often = make_bucket(), bucket_of({"v": torch.zeros(23)})
    codec, other = make(), make()
    for step in range(6):
        _alone(codec, often, make_message(often, step))
        if step % 3 == 0:
            _alone(codec, seldom, make_message(seldom, step))
    other.remember({name: kept.tensor.clone() for name, kept in codec.memory().items()})
    for bucket in (seldom, often):
        message = make_message(bucket, 7)
        assert torch.equal(_alone(codec, bucket, message), _alone(other, bucket, message))


def check_what_is_no_message_is_refused(make: MakeCodec) -> None:
    codec, bucket = make(), make_bucket()
    sent = codec.encode(bucket, make_message(bucket))
    for wrong in (sent.reshape(-1)[:-1], sent.to(torch.complex64)):
        try:
            codec.decode(bucket, wrong)
        except EncodingError:
            continue
        raise AssertionError(f"decoded {wrong.shape} {wrong.dtype}")


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}


def torch_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _keeps_residual(make: MakeCodec) -> bool:
    codec, bucket = make(), make_bucket()
    codec.encode(bucket, make_message(bucket))
    return _residual_of(codec, bucket) is not None


def _residual_of(codec: AbstractCodec, bucket: Bucket) -> Tensor | None:
    kept = codec.memory()
    names = [f"residual/{name}" for name in bucket.names]
    return torch.cat([kept[name].tensor.reshape(-1) for name in names]) if names[0] in kept else None


def _decodes(codec: AbstractCodec) -> bool:
    """Whether one message alone can be decoded; that of several rounds cannot."""
    return codec.is_dense or codec.cost(make_bucket()).is_gathered or codec.cost(make_bucket()).num_rounds == 1


def _decoded(codec: AbstractCodec, bucket: Bucket, message: Tensor) -> Tensor:
    return codec.decode(bucket, codec.encode(bucket, message))


def _alone(codec: AbstractCodec, bucket: Bucket, message: Tensor) -> Tensor:
    """What a group of one rank makes of a message."""
    group = SoloGroup()
    sent = codec.encode(bucket, message)
    total = ReductionWork(group, codec.reduce(bucket, sent, group)).wait()
    return total.reshape(-1)
