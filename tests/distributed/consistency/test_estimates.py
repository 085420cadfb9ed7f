"""Gossip of changes: ranks come together though little is sent, keep their mean, and know each other to the bit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from weft.distributed.codecs import make_codec
from weft.distributed.consistency.estimates import Estimates
from weft.distributed.consistency.gossip import Gossip
from weft.distributed.consistency.graphs import make_mixing
from weft.distributed.group import AbstractGroup
from weft.distributed.virtual import run_virtual
from weft.errors import PlanError
from weft.specs import parse_plan
from weft.training.optimizers import OptimizerState

STATE: Any = OptimizerState
CODECS = [("qsgd(8)", 30), ("sign", 60), ("onebit", 60), ("topk(0.1)", 150), ("topk(0.02)", 600)]


def weights_of(rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return {"w": torch.randn(30, 20, generator=generator), "b": torch.randn(50, generator=generator)}


def mix(group: AbstractGroup, codec: str, num_steps: int, graph: str = "ring", gamma: float | None = None) -> Any:
    """Ranks that begin apart, and do nothing but gossip: their weights, and what is known of whom."""
    parameters = weights_of(group.rank)
    given = make_codec(parse_plan(f"compress={codec}").compress, rank=group.rank)
    scheme = Gossip(group, make_mixing(graph, group.size), mix="after", codec=given, gamma=gamma)
    scheme.join(parameters)
    scheme.begin_together()
    for step in range(num_steps):
        scheme.begin(step, 1.0)
        scheme.before_update()
        scheme.after_update(STATE)
    estimates = scheme._estimates
    assert estimates is not None
    sources = make_mixing(graph, group.size).graph[group.rank]
    known = {source: torch.cat(messages) for source, messages in zip(sources, estimates._others, strict=True)}
    own = torch.cat([message.view(-1) for message in estimates._own])
    return torch.cat([tensor.view(-1) for tensor in parameters.values()]), own, known


def distance(weights: list[Tensor]) -> float:
    rows = torch.stack(weights)
    return float((rows - rows.mean(0)).norm())


@pytest.mark.parametrize(("codec", "num_steps"), CODECS)
@pytest.mark.parametrize("graph", ["ring", "complete"])
def test_ranks_come_together_and_keep_their_mean(codec: str, num_steps: int, graph: str) -> None:
    before = run_virtual(lambda g: mix(g, codec, 0, graph), 4).results
    after = run_virtual(lambda g: mix(g, codec, num_steps, graph), 4).results
    first, last = [one[0] for one in before], [one[0] for one in after]
    assert distance(last) < 0.05 * distance(first)
    torch.testing.assert_close(sum(last), sum(first), rtol=0, atol=1e-4)


@pytest.mark.parametrize("codec", ["sign", "topk(0.1)", "qsgd(8)"])
def test_both_ends_know_the_same_bits(codec: str) -> None:
    ranks = run_virtual(lambda g: mix(g, codec, 5), 5).results
    for _, _, known in ranks:
        assert all(torch.equal(known[source], ranks[source][1]) for source in known)


def test_an_estimate_that_one_end_does_not_bring_up_to_date_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Estimates.take

    def wrong(estimates: Estimates) -> Any:
        before = [message.clone() for message in estimates._own]
        traffic = right(estimates)
        for message, old in zip(estimates._own, before, strict=True):
            message.copy_(old)
        return traffic

    monkeypatch.setattr(Estimates, "take", wrong)
    ranks = run_virtual(lambda g: mix(g, "sign", 60), 4).results
    assert not torch.equal(ranks[0][2][1], ranks[1][1])
    assert not distance([one[0] for one in ranks]) < 0.05 * distance([one[0] for one in ranks_at_first()])


def ranks_at_first() -> list[Any]:
    return list(run_virtual(lambda g: mix(g, "sign", 0), 4).results)


def test_a_codec_that_also_keeps_what_it_did_not_send_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be sent twice: by the codec, and as the difference from what is known."""
    monkeypatch.setattr("weft.distributed.consistency.estimates.forget_unsent", lambda codec: None)
    ranks = run_virtual(lambda g: mix(g, "topk(0.02)", 600), 4).results
    assert not distance([one[0] for one in ranks]) < 0.05 * distance([one[0] for one in ranks_at_first()])


def test_steps_that_are_too_long_swing_apart() -> None:
    """Why gamma is not 1 where little is sent."""
    ranks = run_virtual(lambda g: mix(g, "topk(0.02)", 300, gamma=1.0), 4).results
    assert distance([one[0] for one in ranks]) > 0.5 * distance([one[0] for one in ranks_at_first()])


REFUSED = {
    "data=4 consistency=gossip(ring) compress=qsgd(4)": "come nearer",
    "data=4 consistency=gossip(ring) compress=terngrad": "come nearer",
    "data=4 consistency=gossip(ring) compress=threshold": "come nearer",
    "data=4 consistency=gossip(ring) compress=topk(0.1,sampled)": "come nearer",
    "data=4 consistency=gossip(ring) compress=powersgd": "same step",
    "data=4 consistency=gossip(ring) compress=dgc": "same step",
    "data=4 consistency=gossip(ring,mix=pair) compress=sign": "who meets",
    "data=4 consistency=gossip(ring,lost=drop) compress=topk": "who meets",
    "data=4 consistency=elastic(2) compress=topk": "centre",
    "data=4 consistency=elastic(2) topology=server compress=onebit": "centre",
    "data=4 consistency=async topology=server compress=randomk": "same step",
    "data=2 tensor=2 consistency=local(2) compress=topk": "split layers",
    "shard=2 tensor=2 compress=topk": "split layers",
    "data=4 consistency=gossip(ring,gamma=0.5) compress=bf16": "these send them",
    "data=4 consistency=gossip(ring,gamma=2) compress=topk": "up to 1",
    "data=2 consistency=local(2) compress=dgc": "momentum",
}


@pytest.mark.parametrize(("plan", "reason"), REFUSED.items())
def test_what_makes_no_sense_is_refused_with_the_reason(plan: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        parse_plan(plan)
