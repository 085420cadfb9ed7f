"""Plans with lossy compression on virtual ranks: held to their equations, and refused where there are none."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.codecs.test_schemes import prove
from weft.errors import UsageError
from weft.proving.compressed_sums import check_compressed, is_lossy
from weft.proving.plan_proof import method_of
from weft.proving.rounding import rounding_of
from weft.proving.script_proof import check_provable
from weft.specs import parse_plan
from weft.specs.axes import AXES
from weft.torch_private import use_determinism

CODECS = [
    "qsgd(4)",
    "terngrad",
    "onebit(block=256)",
    "sign(block=256)",
    "topk(0.05)",
    "topk(0.05,select=sampled)",
    "topk(0.05,sum=split)",
    "threshold(0.01)",
    "randomk(0.05)",
    "dgc(0.02,warmup=3)",
    "powersgd(2)",
    "bf16(round=stochastic)",
    "fp16(round=stochastic)",
]
PLANS = [
    "data=3 topology=direct",
    "shard=2 topology=direct",
    "data=2 shard=2 topology=direct",
    "data=2 consistency=local(2) topology=direct",
    "data=2 consistency=local(2,after=2) topology=direct",
]
QUICK = {PLANS[0]: CODECS, PLANS[1]: ["topk(0.05)", "qsgd(4)"], PLANS[2]: ["dgc(0.02,warmup=3)"]}
QUICK |= {PLANS[3]: ["topk(0.05)", "powersgd(2)"], PLANS[4]: ["sign(block=256)"]}
MAKES_NO_SENSE = [(plan, "dgc") for plan in PLANS if "local" in plan] + [(p, "powersgd") for p in PLANS if "shard" in p]
CASES = [
    pytest.param(plan, codec, marks=[] if codec in QUICK[plan] else [pytest.mark.long])
    for plan in PLANS
    for codec in CODECS
    if (plan, codec.partition("(")[0]) not in MAKES_NO_SENSE
]


@pytest.fixture(autouse=True)
def determinism() -> Iterator[None]:
    with use_determinism():
        yield


@pytest.mark.parametrize(("plan", "codec"), CASES)
def test_ranks_follow_the_equations_of_their_compression(plan: str, codec: str, tmp_path: Path) -> None:
    proof = prove(f"{plan} compress={codec}", tmp_path)
    assert proof.passed, proof.finding
    is_rounded_twice = "stochastic" in codec and "data=2 shard=2" in plan
    assert proof.is_bitwise or "powersgd" in codec or is_rounded_twice
    assert proof.num_steps >= 4


def test_every_lossy_codec_of_the_table_is_among_them() -> None:
    """A row that is added must come with its equations."""
    lossy = {name for name in AXES["compress"] if is_lossy(parse_plan(f"data=2 compress={name}"))}
    assert lossy - {"auto"} | {"bf16", "fp16"} == {codec.partition("(")[0] for codec in CODECS}


REFUSED = [
    "data=2 topology=server compress=topk",
    "data=2 consistency=async topology=server compress=qsgd",
    "data=2 consistency=stale(1) topology=server compress=bf16(round=stochastic)",
    "data=2 consistency=local(2,outer=nesterov) compress=topk",
    "data=1 shard=2 shard_level=3 compress=topk",
    "data=2 pipeline=2 compress=topk",
]


@pytest.mark.parametrize("plan", REFUSED)
def test_a_plan_without_equations_is_refused(plan: str) -> None:
    """The proof of a plan that nothing is known of would pass whatever its ranks do."""
    with pytest.raises(UsageError, match="keeps numbers back, is proved of ranks in a group"):
        method_of(parse_plan(plan))


@pytest.mark.parametrize(
    ("compress", "reason"),
    [
        ("auto", "hangs on a measured link"),
        ("topk(0.01,sum=doubling)", "in another order than that of ranks"),
        ("topk(0.01,bits=4)", "or in codes"),
        ("dgc(0.01,sum=dense,bits=2)", "or in codes"),
    ],
)
def test_sums_without_a_reference_are_refused(compress: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        method_of(parse_plan(f"data=2 compress={compress}"))


def test_a_rounding_is_not_found_where_there_is_none() -> None:
    for text in ("data=2 compress=topk", "data=2 compress=bf16(round=stochastic)"):
        with pytest.raises(UsageError, match="hang on chance, or on what was kept back"):
            rounding_of(parse_plan(text))


def test_a_script_is_not_proved_against_one_process() -> None:
    with pytest.raises(UsageError, match="gives other parameters than one process has"):
        check_provable(parse_plan("data=2 compress=topk"))


def test_a_single_rank_sends_nothing() -> None:
    check_compressed(parse_plan("data=1 compress=topk"))
    assert not is_lossy(parse_plan("data=1 compress=topk"))
