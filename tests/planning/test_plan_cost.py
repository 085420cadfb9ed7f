"""What codecs and shards of the optimizer's state change in the cost of a plan; test_plan_costs.py counts the rest."""

from dataclasses import replace

import pytest

from weft.errors import UsageError
from weft.planning.codec_cost import CodecCost, codec_cost
from weft.planning.plan_cost import plan_cost
from weft.specs import parse_plan
from weft.specs.plan import Choice, Plan


@pytest.mark.parametrize("text", ["data=4", "data=4 consistency=async topology=server(2)", "data=4 consistency=local"])
def test_half_the_bytes_travel_in_half_precision(text: str) -> None:
    plan = parse_plan(text)
    whole, half = (plan_cost(replace(plan, compress=Choice(name)), 1000.0) for name in ("none", "bf16"))
    assert [one.bytes_sent for one in half.addresses] == [one.bytes_sent / 2 for one in whole.addresses]
    assert half.rounds == whole.rounds and half.busiest.memory >= whole.busiest.memory


def test_half_precision_reads_and_writes_what_it_turns() -> None:
    assert codec_cost("fp16", 1000.0) == CodecCost(500.0, touched_bytes=3000.0)
    assert codec_cost(Choice("fp16"), 1000.0, element_bytes=8).sent_bytes == 250.0
    assert codec_cost("bf16", 1000.0, element_bytes=2) == codec_cost("none", 1000.0) == CodecCost(1000.0)


def test_a_codec_without_a_formula_is_refused() -> None:
    with pytest.raises(UsageError, match="cost of this compression is not known"):
        codec_cost("zip", 1000.0)


def test_shards_send_as_much_as_an_all_reduce_and_hold_a_part_of_the_state() -> None:
    whole, cut = plan_cost(Plan(data=4), 1000.0), plan_cost(Plan(data=1, shard=4), 1000.0, state_bytes=800.0)
    assert [one.bytes_sent for one in cut.addresses] == [one.bytes_sent for one in whole.addresses]
    # Beside the state that it does not hold, a part of the sums, and messages on their way back.
    assert cut.of("worker").memory == whole.of("worker").memory - 600.0
    both = plan_cost(Plan(data=2, shard=4), 1000.0).of("worker")
    assert both.bytes_sent == 750 + 2 * 0.5 * 250 + 750 and both.rounds == 14 + 2 + 3  # of the loss, parts, weights
