"""The schemes of servers, carried out by virtual workers: limits, records, replays and faults."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed.consistency.server.served import Course, make_parameters, reference, train
from weft.distributed.consistency.server import (
    Commit,
    Decision,
    Release,
    read_decisions,
    read_summary,
)
from weft.distributed.group.faulty import Delay, Kill
from weft.distributed.mailbox import Duplicate
from weft.errors import RunFolderError
from weft.proving.audit import audit_arrival, audit_rounds
from weft.specs import parse_plan
from weft.training.optimizers import SGD, Adam, Momentum, Optimizer

SCHEMES = [
    "async",
    "async(full)",
    "async(staleness)",
    "async(share,difference)",
    "async(share,gradient,2)",
    "stale(0)",
    "stale(2)",
    "stale(1,commit=arrival)",
    "backup(1)",
    "backup(1,deadline=0.02)",
    "backup(1,deadline=adaptive)",
]


def same(first: dict[str, Tensor] | None, second: dict[str, Tensor] | None) -> bool:
    assert first is not None and second is not None
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("rule", [Momentum(), Adam()], ids=["momentum", "adam"])
@pytest.mark.parametrize("scheme", ["stale(0)", "backup(0)"])
@pytest.mark.parametrize(("num_ranks", "num_shards"), [(2, 1), (3, 2), (4, 3)])
def test_the_limits_are_the_synchronous_run_to_the_last_bit(
    scheme: str, num_ranks: int, num_shards: int, rule: Momentum | Adam
) -> None:
    def make() -> Optimizer:
        return Optimizer(rule, lr=0.05)

    plan = f"data={num_ranks} consistency={scheme} topology=server(shards={num_shards})"
    outcome = train(plan, make_optimizer=make)
    expected = reference(num_ranks, 12, make)
    assert all(same(found, expected) for found in outcome.weights)
    assert outcome.servers[0].updates == 12


def test_an_infinite_bound_is_the_asynchronous_run() -> None:
    topology = "topology=server(shards=2)"
    first = train(f"data=4 consistency=async {topology}")
    second = train(f"data=4 consistency=stale(inf,commit=arrival) {topology}")
    assert same(first.weights[0], second.weights[0])
    assert first.servers == second.servers and first.seconds == second.seconds


def test_lost_momentum_is_found_by_the_limit() -> None:
    """The planted fault: a server that runs plain SGD where the plan has momentum."""

    plan = "data=2 consistency=stale(0) topology=server"
    outcome = train(plan, Course(parse_plan(plan), make_optimizer=lambda: Optimizer(SGD(), lr=0.05)))
    assert not same(outcome.weights[0], reference(2, 12, lambda: Optimizer(Momentum(), lr=0.05)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_run_is_audited_and_replayed_to_the_last_bit(scheme: str, tmp_path: Path) -> None:
    """The replay has other speeds, so that without the record it would take another course."""
    plan = f"data=4 consistency={scheme} topology=server(shards=2)"
    outcome = train(plan, run=tmp_path / "first")
    again = train(plan, replay=tmp_path / "first", run=tmp_path / "again", seconds=lambda rank, step: 0.01 * (4 - rank))
    assert same(outcome.weights[0], outcome.weights[3])
    assert same(outcome.weights[0], again.weights[0])
    for shard in range(2):
        decisions = read_decisions(tmp_path / "first", 0, shard)
        assert decisions == read_decisions(tmp_path / "again", 0, shard)
        assert read_summary(tmp_path / "first", 0, shard) == outcome.servers[shard]
        assert _audit(decisions, scheme, shard) == []


def _audit(decisions: list[Decision], scheme: str, shard: int) -> list[str]:
    choice = parse_plan(f"data=4 consistency={scheme} topology=server").consistency
    options = dict(choice.parameters)
    if choice.name == "async" or options.get("commit") == "arrival":
        return audit_arrival(decisions, 4, float(options.get("bound", "inf")), shard=shard)
    bound, spare = int(options.get("bound", 0)), int(options.get("workers", 0))
    has_deadline = options.get("deadline", "none") != "none"
    return audit_rounds(decisions, 4, bound=bound, spare=spare, has_deadline=has_deadline)


def test_without_its_record_the_run_takes_another_course(tmp_path: Path) -> None:
    plan = "data=4 consistency=async topology=server"
    first, second = train(plan), train(plan, seconds=lambda rank, step: 0.01 * (4 - rank))
    assert not same(first.weights[0], second.weights[0])
    with pytest.raises(RunFolderError, match="no record of what its servers decided"):
        read_decisions(tmp_path, 0, 0)


def test_the_staleness_of_every_update_is_recorded(tmp_path: Path) -> None:
    outcome = train("data=4 consistency=async topology=server", run=tmp_path)
    decisions = read_decisions(tmp_path, 0, 0)
    version, got, ages = 0, dict[int, int](), list[int]()
    for decision in decisions:
        if isinstance(decision, Commit):
            ages.append(version - got[decision.pushes[0][0]])
            version += 1
        elif isinstance(decision, Release):
            assert decision.version is not None
            got[decision.rank] = decision.version
    assert outcome.servers[0].staleness == tuple(ages.count(age) for age in range(max(ages) + 1))
    assert outcome.servers[0].updates == 48


def test_a_fast_rank_takes_more_of_the_work_where_nobody_waits(tmp_path: Path) -> None:
    train("data=2 consistency=async topology=server", run=tmp_path, seconds=lambda rank, step: (0.01, 0.03)[rank])
    ranks = [d.pushes[0][0] for d in read_decisions(tmp_path, 0, 0) if isinstance(d, Commit)]
    assert len(ranks) == 24
    assert 16 <= ranks.count(0) <= 19


def test_late_gradients_are_dropped_and_counted() -> None:
    def seconds(rank: int, step: int) -> float:
        return 0.1 if rank == 2 else 0.01

    outcome = train("data=3 consistency=backup(1) topology=server(shards=2)", seconds=seconds)
    slow = train("data=3 consistency=backup(0) topology=server(shards=2)", seconds=seconds)
    assert all(server.dropped >= 1 and server.updates == 12 for server in outcome.servers)
    assert outcome.seconds < 0.5 * slow.seconds


# ---- faults


@pytest.mark.parametrize("scheme", ["async", "stale(1)", "stale(1,commit=arrival)", "backup(1)"])
def test_a_worker_that_dies_is_dropped_and_training_goes_on(scheme: str, tmp_path: Path) -> None:
    plan = f"data=4 consistency={scheme} topology=server(shards=2)"
    outcome = train(plan, faults=[Kill(2, after_seconds=0.1)], run=tmp_path)
    assert outcome.weights[2] is None
    assert same(outcome.weights[0], outcome.weights[3])
    again = train(plan, replay=tmp_path)  # where nobody dies, and rank 2 is told to stop
    assert same(outcome.weights[0], again.weights[0])


def test_a_message_that_comes_twice_is_refused_and_counted() -> None:
    plan = "data=2 consistency=stale(0) topology=server"
    plain = train(plan)
    outcome = train(plan, faults=[Duplicate(1, first_call=3)])
    assert outcome.servers[0].refused == {"duplicate": 1}
    assert same(plain.weights[0], outcome.weights[0])


def test_a_slow_link_changes_when_but_not_what_is_synchronous() -> None:
    plan = "data=2 consistency=stale(0) topology=server(shards=2)"
    assert same(train(plan).weights[0], train(plan, faults=[Delay(1, 0.5, first_call=2)]).weights[0])


# ---- what is sent


def test_gradients_set_out_while_backward_runs() -> None:
    outcome = train("data=2 consistency=async topology=server(shards=2)")
    sent = outcome.mailboxes[0].traffic.sent_under("part")
    assert sent.num_messages > 0 and sent.num_bytes > 0


def test_parts_send_to_one_group_of_shards_in_a_step() -> None:
    whole = train("data=2 consistency=async topology=server(shards=2)", num_steps=40)
    parts = train("data=2 consistency=async(share,gradient,2) topology=server(shards=2)", num_steps=40)
    bytes_of = [
        sum(t.num_bytes for key, t in o.mailboxes[0].traffic.sent.items() if key[1] in ("push", "part"))
        for o in (whole, parts)
    ]
    assert 0.4 * bytes_of[0] < bytes_of[1] < 0.6 * bytes_of[0]


def test_differences_of_plain_sgd_are_its_gradients() -> None:
    def make() -> Optimizer:
        return Optimizer(SGD(), lr=0.05)

    gradient = train("data=3 consistency=async topology=server", make_optimizer=make)
    difference = train("data=3 consistency=async(share,difference) topology=server", make_optimizer=make)
    assert gradient.weights[0] is not None and difference.weights[0] is not None
    for name in make_parameters():
        torch.testing.assert_close(gradient.weights[0][name], difference.weights[0][name])
