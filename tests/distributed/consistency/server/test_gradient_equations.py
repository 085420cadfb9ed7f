"""The equations of updates through servers, held against virtual workers; and faults planted in the shards."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.consistency.server.faulty_updates import FAULTY_UPDATES
from tests.distributed.consistency.server.served import LR, Outcome, make_parameters, momentum, pull, train
from tests.distributed.consistency.server.test_hosts import far
from weft.distributed.consistency.server import (
    Contribution,
    Decision,
    Drop,
    Settings,
    Shard,
    read_decisions,
)
from weft.distributed.consistency.server.settings import may_cut
from weft.distributed.consistency.server.shard_run import ShardRun
from weft.distributed.group.faulty import Delay, Kill
from weft.errors import CorruptFileError
from weft.proving.gradient_equations import Computed, Setup, follow_gradients
from weft.proving.held import elements_of_servers
from weft.proving.proof import clone
from weft.proving.reference import Replica
from weft.specs import parse_plan
from weft.training.optimizers import SGD, AbstractOptimizer, Adam, Nesterov, Optimizer, TorchOptimizer

MakeOptimizer = Callable[[], AbstractOptimizer]

SCHEMES = [
    "async",
    "async(full)",
    "async(staleness)",
    "async(share,difference)",
    "async(full,gradient,2)",
    "async(staleness,difference,2)",
    "stale(0)",
    "stale(2)",
    "stale(1,commit=arrival)",
    "stale(2,commit=arrival,lr=staleness)",
    "backup(1)",
    "backup(2,deadline=0.02)",
    "backup(1,deadline=adaptive)",
]


def slow_last(rank: int, step: int) -> float:
    return 0.035 if rank == 3 else 0.01 + 0.001 * rank


def follow(
    text: str,
    records: Sequence[Sequence[Decision]],
    make_optimizer: MakeOptimizer = momentum,
    clip_norm: float | None = None,
) -> dict[str, Tensor]:
    """Where the equations lead, of the gradients of `pull`."""
    plan, parameters = parse_plan(text), make_parameters()

    def compute(replica: Replica, batch: int, share: int) -> Computed:
        gradients = {name: pull(weight, share, batch) for name, weight in replica.weights.items()}
        return Computed(gradients, 1 / plan.num_ranks, LR)

    optimizer = make_optimizer()
    cuts = elements_of_servers(clone(parameters), int(plan.topology["shards"]), may_cut=may_cut(optimizer))
    state = optimizer.init(parameters)
    replicas = [Replica(clone(parameters), state, torch.zeros(0)) for _ in range(plan.num_ranks)]
    setup = Setup(parameters, make_optimizer, cuts, replicas, compute, clip_norm)
    return follow_gradients(plan, records, setup)[0]


def records_of(text: str, run: Path) -> list[list[Decision]]:
    return [read_decisions(run, 0, shard) for shard in range(int(parse_plan(text).topology["shards"]))]


def is_as_followed(outcome: Outcome, text: str, run: Path, **options: Any) -> bool:
    found, expected = outcome.weights[0], follow(text, records_of(text, run), **options)
    assert found is not None
    return all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_servers_do_what_the_equations_say_to_the_last_bit(scheme: str, num_shards: int, tmp_path: Path) -> None:
    plan = f"data=4 consistency={scheme} topology=server(shards={num_shards})"
    outcome = train(plan, run=tmp_path, seconds=slow_last)
    assert is_as_followed(outcome, plan, tmp_path)


RULES: list[MakeOptimizer] = [
    lambda: Optimizer(SGD(), lr=LR),
    lambda: Optimizer(Nesterov(), lr=LR),
    lambda: Optimizer(Adam(), lr=LR),
    lambda: TorchOptimizer(torch.optim.RMSprop, lr=LR),
]


@pytest.mark.parametrize("scheme", ["async", "stale(1)", "async(full,difference)"])
@pytest.mark.parametrize("make", RULES, ids=["sgd", "nesterov", "adam", "torch"])
def test_any_optimizer_is_followed(make: MakeOptimizer, scheme: str, tmp_path: Path) -> None:
    plan = f"data=3 consistency={scheme} topology=server(shards=2)"
    outcome = train(plan, run=tmp_path, make_optimizer=make)
    assert is_as_followed(outcome, plan, tmp_path, make_optimizer=make)


@pytest.mark.parametrize(
    ("scheme", "num_shards"), [("async", 2), ("async(share,difference)", 2), ("stale(1)", 1), ("backup(1)", 1)]
)
def test_clipping_is_followed(scheme: str, num_shards: int, tmp_path: Path) -> None:
    plan = f"data=4 consistency={scheme} topology=server(shards={num_shards})"
    outcome = train(plan, run=tmp_path, clip_norm=0.5)
    assert is_as_followed(outcome, plan, tmp_path, clip_norm=0.5)
    assert not is_as_followed(outcome, plan, tmp_path, clip_norm=0.6)


@pytest.mark.parametrize(
    "scheme", ["async", "async(full)", "async(staleness)", "async(share,difference)", "stale(1,commit=arrival)"]
)
def test_what_host_servers_join_is_followed(scheme: str, tmp_path: Path) -> None:
    plan = f"data=5 consistency={scheme} topology=server(shards=2,inner=3)"
    outcome = train(plan, run=tmp_path, network=far())
    assert any(len(getattr(d, "pushes", ())) > 1 for d in records_of(plan, tmp_path)[0])
    assert is_as_followed(outcome, plan, tmp_path)


@pytest.mark.parametrize("scheme", ["async", "stale(1)", "stale(1,commit=arrival)", "backup(1)"])
def test_a_rank_that_dies_on_the_way_is_followed(scheme: str, tmp_path: Path) -> None:
    plan = f"data=4 consistency={scheme} topology=server(shards=2)"
    outcome = train(plan, run=tmp_path, faults=[Kill(2, after_seconds=0.1)])
    assert is_as_followed(outcome, plan, tmp_path)


def test_shards_that_close_rounds_without_each_other_are_followed(tmp_path: Path) -> None:
    """A rank that comes too late at one shard asks the others for weights anew."""
    plan = "data=4 consistency=backup(1) topology=server(shards=2)"
    late = [Delay(1, 0.03, first_call=7), Delay(2, 0.03, first_call=13)]  # between its push to one and to the other
    outcome = train(plan, run=tmp_path, seconds=lambda rank, step: 0.01 + 0.001 * rank, faults=late)
    first, second = ([d for d in own if isinstance(d, Drop)] for own in records_of(plan, tmp_path))
    assert first != second
    assert is_as_followed(outcome, plan, tmp_path)


def test_records_of_two_trainings_do_not_fit_together(tmp_path: Path) -> None:
    plan = "data=4 consistency=async topology=server(shards=2)"
    train(plan, run=tmp_path / "first")
    train(plan, run=tmp_path / "second", seconds=slow_last)
    first, second = (records_of(plan, tmp_path / name) for name in ("first", "second"))
    with pytest.raises(CorruptFileError, match="do not fit together"):
        follow(plan, [first[0], second[1]])


# ---- faults

true_commit, true_begin = Shard.commit, ShardRun.__init__


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("scheme", ["async", "stale(2)", "stale(2,commit=arrival,lr=full)", "backup(1)"])
@pytest.mark.parametrize("fault", FAULTY_UPDATES)
def test_a_fault_in_the_updates_is_found(
    fault: str, scheme: str, num_shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the audit nor a replay sees these: the decisions are right, and a replay errs in the same way."""
    plan = f"data=4 consistency={scheme} topology=server(shards={num_shards})"
    monkeypatch.setattr(Shard, "_update", FAULTY_UPDATES[fault])
    assert not is_as_followed(train(plan, run=tmp_path, seconds=slow_last), plan, tmp_path)


@pytest.mark.parametrize(
    ("scheme", "rate"),
    [
        ("async", "full"),
        ("async(full)", "share"),
        ("async(staleness)", "share"),
        ("stale(2,commit=arrival)", "staleness"),
    ],
)
def test_another_rule_for_the_learning_rate_is_found(scheme: str, rate: Any, tmp_path: Path) -> None:
    plan = f"data=4 consistency={scheme} topology=server(shards=2)"

    def spoil(settings: Settings) -> Settings:
        return replace(settings, rate=rate)

    assert not is_as_followed(train(plan, run=tmp_path, spoil_server=spoil), plan, tmp_path)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_late_gradient_that_is_used_after_all_is_found(
    num_shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record says that it was dropped: the next round has it all the same."""

    class Keeping(dict[Any, Contribution]):
        def __delitem__(self, push: Any) -> None:
            late.append(self.pop(push))

    def begin(run: ShardRun, *given: Any, **options: Any) -> None:
        true_begin(run, *given, **options)
        run.pending = Keeping()

    def commit(shard: Shard, contributions: Sequence[Contribution], *given: Any) -> None:
        fitting = [one for one in late if shard.accepts(one.tensors)]
        true_commit(shard, [*contributions, *fitting], *given)
        late[:] = [one for one in late if one not in fitting]

    late: list[Contribution] = []
    monkeypatch.setattr(ShardRun, "__init__", begin)
    monkeypatch.setattr(Shard, "commit", commit)
    plan = f"data=4 consistency=backup(1) topology=server(shards={num_shards})"
    outcome = train(plan, run=tmp_path, seconds=slow_last)
    assert outcome.servers[0].dropped > 0
    assert not is_as_followed(outcome, plan, tmp_path)
