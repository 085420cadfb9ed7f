"""Host servers in front of the shards: what they join, followed in one process by the record, and their faults."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.consistency.server.served import LR, Course, Outcome, make_parameters, pull, train
from weft.distributed.consistency.server import (
    Commit,
    Decision,
    JoinPolicy,
    Release,
    host,
    read_decisions,
)
from weft.distributed.group.faulty import Kill
from weft.distributed.mailbox import Duplicate
from weft.distributed.placement.cut import cut_evenly
from weft.planning.cluster import Link
from weft.planning.network import LinkSchedule, NetworkModel
from weft.planning.plan_cost import plan_cost
from weft.proving.audit import audit_arrival, audit_hosts
from weft.simulation.place import with_host_servers
from weft.specs import parse_plan
from weft.training.optimizers import SGD, AbstractOptimizer, Adam, Momentum, Optimizer

PLAN = "data=5 consistency=async topology=server(shards=2,inner=3)"


def far(inner: int = 3) -> NetworkModel:
    """Hosts that are far from each other: gradients wait for those that are under way, and are joined."""
    return NetworkModel(Link(alpha=0.02, beta=1e-9), inside=Link(alpha=1e-6, beta=1e-10), ranks_per_host=inner)


def records(run: Path, text: str = PLAN) -> tuple[list[list[Decision]], list[list[Decision]]]:
    plan = parse_plan(text)
    hosts = [read_decisions(run, 0, number, "host") for number in range(plan.num_hosts)]
    return hosts, [read_decisions(run, 0, shard) for shard in range(int(plan.topology["shards"]))]


@torch.no_grad()
def follow(text: str, run: Path, optimizer: AbstractOptimizer) -> dict[str, Tensor]:
    """The weights at the end, from each shard's own record: joined gradients are one, the mean by shares, and count by
    the sum of these. A gradient of `pull` is of its own element alone, so each shard can be followed by itself."""
    plan = parse_plan(text)
    size, whole = plan.num_ranks, make_parameters()
    for shard, pieces in enumerate(cut_evenly(whole, int(plan.topology["shards"]))):
        weights = {str(i): piece.of(whole[piece.name]).clone() for i, piece in enumerate(pieces)}
        state, seen = optimizer.init(weights), dict[int, dict[str, Tensor]]()
        for decision in read_decisions(run, 0, shard):
            if isinstance(decision, Release):
                seen[decision.rank] = {name: weight.clone() for name, weight in weights.items()}
            elif isinstance(decision, Commit):
                share = 1 / size / sum(1 / size for _ in decision.pushes)
                total: dict[str, Tensor | None] = {}
                for i, piece in enumerate(pieces):
                    full, terms = make_parameters()[piece.name], []
                    for rank, step in decision.pushes:
                        piece.of(full)[...] = seen[rank][str(i)]
                        terms.append(piece.of(pull(full, step % size, step // size)) * share)
                    total[str(i)] = sum(terms[1:], terms[0])
                lr = LR * sum(1 / size for _ in decision.pushes)
                state = optimizer.update(total, weights, state, lr)
        for i, piece in enumerate(pieces):
            piece.of(whole[piece.name])[...] = weights[str(i)]
    return whole


def is_as_followed(outcome: Outcome, text: str, run: Path, optimizer: AbstractOptimizer) -> bool:
    expected, found = follow(text, run, optimizer), outcome.weights[0]
    assert found is not None
    return all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("rule", [SGD(), Momentum(), Adam()], ids=["sgd", "momentum", "adam"])
@pytest.mark.parametrize("inner", [2, 3, 4, 5])
def test_joined_gradients_are_one_update_to_the_last_bit(inner: int, rule: Any, tmp_path: Path) -> None:
    """Ragged hosts: of 2, 2 and 1 ranks, of 3 and 2, of 4 and 1, and one of all. Of two, one waits while the other's
    push is under way, and they are joined only if they come at once."""

    def make() -> Optimizer:
        return Optimizer(rule, lr=LR)

    text = f"data=5 consistency=async topology=server(shards=2,inner={inner})"
    outcome = train(text, run=tmp_path, network=far(inner), make_optimizer=make)
    assert is_as_followed(outcome, text, tmp_path, make())
    hosts, _ = records(tmp_path, text)
    sizes = [len(d.pushes) for decisions in hosts for d in decisions if isinstance(d, Commit)]
    assert (max(sizes) > 1 or inner == 2) and sum(sizes) == 60


def _counted_twice(number: int, pushes: Any, given: Any) -> Any:
    return host.join(number, (*pushes, pushes[0]), [*given, given[0]])


def _lost(number: int, pushes: Any, given: Any) -> Any:
    return host.join(number, pushes[:1], given[:1])


@pytest.mark.parametrize("fault", [_counted_twice, _lost])
def test_a_gradient_that_is_counted_twice_or_lost_is_found(
    fault: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = host.join

    def plant(number: int, pushes: Any, given: Any) -> Any:
        with monkeypatch.context() as within:
            within.setattr(host, "join", right)
            return replace(fault(number, pushes, given), parts=right(number, pushes, given).parts)

    monkeypatch.setattr(host, "join", plant)
    outcome = train(PLAN, run=tmp_path, network=far())
    assert not is_as_followed(outcome, PLAN, tmp_path, Course(parse_plan(PLAN)).make_optimizer())


BOUNDED = ["stale(0,commit=arrival)", "stale(1,commit=arrival)", "stale(2,commit=arrival,lr=staleness)"]


@pytest.mark.parametrize("scheme", ["async", "async(full)", "async(staleness)", "async(share,difference)", *BOUNDED])
def test_a_run_is_audited_and_replayed_to_the_last_bit(scheme: str, tmp_path: Path) -> None:
    text = PLAN.replace("async", scheme)
    bound = float(dict(parse_plan(text).consistency.parameters).get("bound", math.inf))
    first = train(text, run=tmp_path / "first", network=far())
    again = train(text, replay=tmp_path / "first", run=tmp_path / "again", seconds=lambda rank, step: 0.01 * (5 - rank))
    assert same(first, again) and records(tmp_path / "first") == records(tmp_path / "again")
    hosts, shards = records(tmp_path / "first")
    assert audit_hosts(hosts, shards, 3) == []
    assert [audit_arrival(d, 5, bound, shard=shard, inner=3) for shard, d in enumerate(shards)] == [[], []]
    assert not same(first, train(text, seconds=lambda rank, step: 0.01 * (5 - rank)))


def same(first: Outcome, second: Outcome) -> bool:
    one, two = first.weights[0], second.weights[0]
    assert one is not None and two is not None
    return all(torch.equal(one[name], two[name]) for name in one)


def test_what_arrives_while_a_push_is_under_way_is_joined(tmp_path: Path) -> None:
    outcome = train(PLAN, run=tmp_path, network=far())
    hosts, shards = records(tmp_path)
    sizes = [len(d.pushes) for d in hosts[0] if isinstance(d, Commit)]
    assert sum(sizes) / len(sizes) > 1.4
    assert outcome.servers[0].updates == sum(isinstance(d, Commit) for d in shards[0])
    assert sum(outcome.servers[0].staleness) == 60


@pytest.mark.parametrize("scheme", ["async", *BOUNDED])
@pytest.mark.parametrize(("rank", "inner"), [(1, 3), (4, 3), (4, 4)])
def test_a_worker_that_dies_is_dropped_and_training_goes_on(rank: int, inner: int, scheme: str, tmp_path: Path) -> None:
    """One of several, and the only one of its host; in the replay nobody dies, and the rank is told to stop."""
    text = PLAN.replace("inner=3", f"inner={inner}").replace("async", scheme)
    outcome = train(text, faults=[Kill(rank, after_seconds=0.1)], run=tmp_path, network=far(inner))
    assert outcome.weights[rank] is None
    hosts, shards = records(tmp_path, text)
    assert audit_hosts(hosts, shards, inner) == []
    assert same(outcome, train(text, replay=tmp_path))


def test_a_push_that_comes_twice_is_refused_by_the_host_server_and_counted() -> None:
    plain, doubled = train(PLAN), train(PLAN, faults=[Duplicate(1, first_call=4)])
    assert doubled.servers[2].refused == {"duplicate": 1}
    assert same(plain, doubled)


# ---- the audit, on records with a fault in them


def spoil(decisions: list[Decision], change: Callable[[Commit], list[Decision]]) -> list[Decision]:
    """The record with its third update changed."""
    third = [d for d in decisions if isinstance(d, Commit)][2]
    return [other for d in decisions for other in (change(third) if d is third else [d])]


def test_the_audit_finds_what_was_joined_twice_lost_or_given_other_steps(tmp_path: Path) -> None:
    train(PLAN, run=tmp_path, network=far())
    hosts, shards = records(tmp_path)
    twice = [spoil(hosts[0], lambda commit: [commit, commit]), *hosts[1:]]
    assert any("twice" in fault for fault in audit_hosts(twice, shards, 3))
    stranger = [spoil(hosts[0], lambda commit: [Commit(((4, 4),))]), *hosts[1:]]
    assert "rank 4, which is of another host" in audit_hosts(stranger, shards, 3)[0]
    last: list[Decision] = [*hosts[0], Commit(((0, 999),))]
    assert "were lost between host server 0 and shard 0" in audit_hosts([last, *hosts[1:]], shards, 3)[0]
    without: list[Decision] = [d for d in hosts[0] if not isinstance(d, Commit)]
    assert "did not forward" in audit_hosts([without, *hosts[1:]], shards, 3)[0]
    other: list[Decision] = [replace(d, step=7) for d in hosts[0] if isinstance(d, Release)]
    assert any("other steps than shard 0 gave it" in fault for fault in audit_hosts([other, *hosts[1:]], shards, 3))
    mixed = spoil(shards[0], lambda commit: [Commit(((0, 0), (4, 4)))])
    assert any("several gradients" in fault for fault in audit_arrival(mixed, 5, inner=3))


def test_joins_are_all_that_waits_or_what_was_recorded() -> None:
    assert JoinPolicy().choose([(0, 1), (1, 2)]) == ((0, 1), (1, 2))
    assert JoinPolicy().dismiss([(0, 1)]) == ()
    script = JoinPolicy([Commit(((1, 2), (0, 1))), Release(0, 3), Commit(((0, 3),))])
    assert script.choose([(0, 1)]) == ()
    assert script.choose([(0, 1), (1, 2)]) == ((1, 2), (0, 1))
    assert script.dismiss([(1, 4), (0, 3)]) == ((1, 4),)
    assert script.choose([(1, 4), (0, 3)]) == ((0, 3),)


# ---- what is sent


@pytest.mark.parametrize("inner", [3, 4])
def test_the_cost_is_what_was_counted(inner: int, tmp_path: Path) -> None:
    text = f"data=4 consistency=async topology=server(shards=2,place=own,inner={inner})"
    outcome = train(text, network=far(inner), num_steps=24, run=tmp_path)
    size = sum(parameter.nbytes for parameter in make_parameters().values())
    sent = {tag: sum(m.traffic.sent_under(tag).num_bytes for m in outcome.mailboxes) for tag in ("push", "forward")}
    forwards = sum(summary.updates for summary in outcome.servers[2:])
    cost = plan_cost(parse_plan(text), size, joined=96 / forwards)
    assert sent["push"] / 24 == pytest.approx((cost.total_bytes - cost.between_bytes) / 2)
    assert sent["forward"] / 24 == pytest.approx(cost.between_bytes / 2)
    shards = outcome.mailboxes[4:6]
    back = [t.num_bytes for m in shards for (to, tag), t in m.traffic.sent.items() if tag == "weights" and to >= 4]
    assert sum(back) / 24 == pytest.approx(cost.between_bytes / 2)
    assert forwards < 96


def test_the_least_that_goes_between_hosts_is_a_part_of_what_went_before() -> None:
    plain = plan_cost(parse_plan("data=8 consistency=async topology=server(place=own)"), 1000.0)
    plan = parse_plan("data=8 consistency=async topology=server(place=own,inner=4)")
    assert plan_cost(plan, 1000.0).between_bytes == plain.total_bytes / 4
    assert plan_cost(plan, 1000.0).rounds == 4 and math.isfinite(plan_cost(plan, 1000.0).rank_bytes)
    assert plain.between_bytes == 0


def test_a_host_server_is_on_the_host_of_its_workers() -> None:
    network = with_host_servers(far(), parse_plan(PLAN))
    assert [network.host_of(rank) for rank in range(9)] == [0, 0, 0, 1, 1, 1, 2, 0, 1]
    links = LinkSchedule(network, 9)
    near, apart = links.transfer(0, 7, 100, 0.0), links.transfer(0, 8, 100, 0.0)
    assert near.received < 1e-3 < apart.received
    plain = parse_plan("data=4 consistency=async topology=server")
    assert with_host_servers(far(), plain) == far()
