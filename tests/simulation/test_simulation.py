"""Training on virtual ranks: the bits of real ranks, and times that follow from the network and the computation."""

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from weft.distributed.group import Kill
from weft.distributed.placement import buckets
from weft.distributed.virtual import TraceEvent
from weft.engines import local
from weft.errors import DivergedError, PeerLostError, RunFolderError, UsageError
from weft.planning.cluster import Link
from weft.planning.network import NetworkModel
from weft.recipes import digits_mlp
from weft.records.record import RunRecord
from weft.records.record_file import read_record, write_record
from weft.records.run_folder import RunFolder, create_run_folder
from weft.simulation.computation import ComputeModel
from weft.simulation.simulation import Simulation, simulate
from weft.simulation.stragglers import Slow, Straggler
from weft.training.recipe import Recipe
from weft.training.run import resume_run

SLOW = NetworkModel(Link(alpha=1e-4, beta=1e-7))  # 10 MB/s: a bucket takes longer than the layer before it


def tiny(plan: str, **settings: object) -> Recipe:
    recipe = digits_mlp()
    defaults = {"plan": plan, "epochs": 0.2, "batch_size": 64, "schedule": "constant", "target": None}
    for key, value in {**defaults, **settings}.items():
        recipe = recipe.with_setting(key.replace("__", "."), str(value))
    return replace(recipe, rules=())


def run(
    path: Path,
    recipe: Recipe,
    *,
    network: NetworkModel = SLOW,
    compute: ComputeModel | float | None = 0.01,
    trace: bool = False,
    faults: tuple[Kill, ...] = (),
    stragglers: tuple[Straggler, ...] = (),
) -> Simulation:
    folder = create_run_folder(path, recipe.name)
    return simulate(
        recipe, folder=folder, network=network, compute=compute, trace=trace, faults=faults, stragglers=stragglers
    )


def step_time(simulation: Simulation) -> float:
    return simulation.record.repetitions[0].values["step_time"]


def without_dates(record: RunRecord) -> RunRecord:
    return replace(record, created="")


def test_the_same_simulation_twice_gives_the_same_record(tmp_path: Path) -> None:
    one, two = (run(tmp_path / name, tiny("data=3")) for name in "ab")
    assert without_dates(one.record) == without_dates(two.record)
    assert (one.virtual_seconds, one.num_bytes, one.num_events) == (two.virtual_seconds, two.num_bytes, two.num_events)
    assert read_record(tmp_path / "a") == one.record
    assert not (tmp_path / "a" / "checkpoint").exists()


def test_times_of_the_record_are_virtual_and_it_says_so(tmp_path: Path) -> None:
    recipe = tiny("data=2", target="accuracy:0.01")
    record = run(tmp_path / "run", recipe, compute=100.0).record
    values = record.repetitions[0].values
    assert record.clock_rules.startswith("time is virtual") and "100 s per pass" in record.clock_rules
    assert 100 < values["step_time"] < 101
    assert values["wall_clock"] >= values["time_to_target"] == record.repetitions[0].evaluations[0].seconds > 400
    assert values["scaling_efficiency"] == pytest.approx(100 / values["step_time"])
    assert not {"peak_process_memory", "energy", "flop_rate", "share_of_peak"} & values.keys()


@pytest.mark.slow
def test_two_virtual_ranks_end_with_the_bits_of_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.cli.main import main

    monkeypatch.setattr(local, "threads_per_rank", lambda _: 1)
    settings = ("--set=epochs=0.6", "--set=batch_size=31", "--set=schedule=constant", "--seed=3", "--quiet")
    codes = []
    for command in ("run", "simulate"):
        with pytest.raises(SystemExit) as left:
            main([command, "digits_mlp", "--workers", "2", *settings, f"--out={tmp_path / command}"])
        codes.append(left.value.code)
    real, virtual = (read_record(tmp_path / command).repetitions[0] for command in ("run", "simulate"))
    assert codes == [1, 1]
    assert real.hashes == virtual.hashes
    assert real.series["train/loss"] == virtual.series["train/loss"]
    assert [e.values for e in real.evaluations] == [e.values for e in virtual.evaluations]


@pytest.mark.parametrize(
    "plan",
    [
        "data=1",
        "data=4 topology=auto",
        "data=4 topology=direct",
        "data=3 topology=ring",
        "data=3 topology=tree",
        "data=5 topology=halving_doubling",
        "data=4 topology=hierarchical(2)",
        "data=3 topology=server(2)",
    ],
)
def test_every_topology_trains_to_nearly_the_same_loss(tmp_path: Path, plan: str) -> None:
    one, many = (run(tmp_path / name, tiny(text)) for name, text in (("one", "data=1"), ("many", plan)))
    losses = [simulation.record.repetitions[0].series["train/loss"] for simulation in (one, many)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert (many.num_bytes > 0) == (plan != "data=1")


@pytest.mark.parametrize(
    "plan", ["data=8", "data=4 consistency=async topology=server", "data=4 consistency=elastic(2)"]
)
def test_compression_takes_less_time_on_the_wire(tmp_path: Path, plan: str) -> None:
    whole, halved = (run(tmp_path / c, tiny(f"{plan} compress={c}")).record for c in ("none", "bf16"))
    values = [record.repetitions[0].values for record in (whole, halved)]
    assert values[1]["bytes_per_step"] == pytest.approx(values[0]["bytes_per_step"] / 2)
    assert values[1]["communication_exposed"] < 0.75 * values[0]["communication_exposed"]


def test_a_named_algorithm_is_the_one_that_is_used(tmp_path: Path) -> None:
    ring, tree = (run(tmp_path / name, tiny(f"data=4 topology={name}")) for name in ("ring", "tree"))
    assert ring.num_messages > tree.num_messages, "a ring of 4 takes 6 rounds of 4 messages, a tree 6 messages"


def test_more_computation_and_a_slower_network_take_longer(tmp_path: Path) -> None:
    base = step_time(run(tmp_path / "base", tiny("data=2")))
    slower = step_time(run(tmp_path / "network", tiny("data=2"), network=NetworkModel(Link(1e-4, 1e-6))))
    busier = step_time(run(tmp_path / "compute", tiny("data=2"), compute=0.02))
    assert base < busier < base + 0.0101
    assert slower > base


def test_an_update_takes_virtual_time(tmp_path: Path) -> None:
    compute = ComputeModel(0.01, 0.0, 0.5, {})
    assert step_time(run(tmp_path / "run", tiny("data=1"), compute=compute)) == pytest.approx(0.51)


def test_overlap_hides_communication_where_there_is_more_than_one_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer nearest to the loss is sent while the others are still computed; one bucket has nothing to hide in."""
    recipe = tiny("data=2", model__hidden="(64, 64)")
    together = run(tmp_path / "together", recipe, trace=True)
    monkeypatch.setattr(buckets.plan_buckets, "__defaults__", (1, lambda name: None))
    apart = run(tmp_path / "apart", recipe, trace=True)

    def value(simulation: Simulation, name: str) -> float:
        return simulation.record.repetitions[0].values[name]

    assert value(together, "communication_hidden") == 0
    assert value(apart, "communication_hidden") > 0
    assert step_time(apart) < step_time(together)
    assert step_time(apart) < 0.01 + value(apart, "communication_hidden") + value(apart, "communication_exposed")
    assert together.record.repetitions[0].hashes == apart.record.repetitions[0].hashes
    assert overlap_of(apart.trace) > 0


def overlap_of(trace: tuple[TraceEvent, ...]) -> float:
    """Seconds for which rank 0 computed while a collective of its was under way."""
    own = [span for span in trace if span.rank == 0]
    computed = [span for span in own if span.what == "compute"]
    sent = [span for span in own if span.lane == "network"]
    return sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in computed for b in sent)


def test_ranks_of_one_host_wait_for_its_line(tmp_path: Path) -> None:
    free = NetworkModel(Link(1e-5, 1e-8), inside=Link(1e-6, 1e-10), ranks_per_host=4)
    shared = replace(free, host_beta=1e-8)
    times = [step_time(run(tmp_path / name, tiny("data=8 topology=halving_doubling"), network=network))
             for name, network in (("free", free), ("shared", shared))]  # fmt: skip
    assert times[1] > times[0]


def test_a_measured_computation_is_used_where_none_is_given(tmp_path: Path) -> None:
    simulation = run(tmp_path / "run", tiny("data=2"), compute=None)
    assert set(simulation.compute.ready) == {f"{i}.{kind}" for i in (1, 4, 7) for kind in ("weight", "bias")}
    assert step_time(simulation) > simulation.compute.seconds(32)


def test_what_cannot_run_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="batch is larger"):
        run(tmp_path / "run", tiny("data=2", batch_size=5000))
    with pytest.raises(UsageError, match="more ranks than samples"):
        simulate(tiny("data=99"), folder=RunFolder(tmp_path / "run"), compute=0.01)
    assert not (tmp_path / "run").exists()


def test_a_simulation_that_diverges_says_so(tmp_path: Path) -> None:
    recipe = tiny("data=2", optimizer="sgd", optimizer__lr=1e38)
    with pytest.raises(DivergedError, match="first bad tensor"):
        run(tmp_path / "run", recipe)
    assert read_record(tmp_path / "run").clock_rules.startswith("time is virtual")


def test_a_simulation_that_was_interrupted_cannot_be_resumed(tmp_path: Path) -> None:
    record = run(tmp_path / "run", tiny("data=2")).record
    write_record(tmp_path / "run", replace(record, repetitions=(replace(record.repetitions[0], status="running"),)))
    with pytest.raises(RunFolderError, match="is a simulation"):
        resume_run(RunFolder(tmp_path / "run"))


def test_switches_of_the_process_are_put_back(tmp_path: Path) -> None:
    before = torch.get_num_threads(), os.sched_getaffinity(0)
    run(tmp_path / "run", tiny("data=2"))
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == before
    assert not torch.are_deterministic_algorithms_enabled()


def test_shares_of_idle_time_stay_with_their_ranks_when_one_dies(tmp_path: Path) -> None:
    """The dead were left out of the list, so that rank 2 was shown, and recorded, as rank 1."""
    recipe = tiny("data=3 consistency=async topology=server")
    whole = run(tmp_path / "whole", recipe)
    bereft = run(tmp_path / "bereft", recipe, faults=(Kill(1, after_seconds=0.015),))
    assert [math.isnan(share) for share in whole.idle_shares] == [False, False, False]
    assert [math.isnan(share) for share in bereft.idle_shares] == [False, True, False]
    (repetition,) = read_record(tmp_path / "bereft").repetitions
    assert [math.isnan(share) for share in repetition.series["idle_share"]] == [False, True, False]
    assert repetition.values["idle_share"] == pytest.approx((bereft.idle_shares[0] + bereft.idle_shares[2]) / 2)


@pytest.mark.parametrize(
    ("topology", "rank"), [("server(shards=2)", 1), ("server(shards=2,place=own)", 0), ("server(inner=2)", 2)]
)
def test_a_rank_that_is_a_server_too_takes_the_run_with_it(tmp_path: Path, topology: str, rank: int) -> None:
    """The server beside a killed rank lived on, and the run ended as done."""
    recipe = tiny(f"data=4 consistency=async topology={topology}")
    with pytest.raises(PeerLostError, match=f"rank {rank} is lost, and the run with it"):
        run(tmp_path / "run", recipe, faults=(Kill(rank, after_seconds=0.015),))
    assert read_record(tmp_path / "run").repetitions[0].status == "failed"


def test_a_server_dies_with_its_rank_though_that_has_ended(tmp_path: Path) -> None:
    recipe = tiny("data=3 consistency=async topology=server(shards=2)", epochs=0.1)
    with pytest.raises(PeerLostError, match=r"rank 1 was worker, server 1"):
        run(tmp_path / "run", recipe, stragglers=(Slow(2, 100.0),), faults=(Kill(1, after_seconds=0.9),))


def final_bits(simulation: Simulation) -> dict[str, str]:
    return simulation.record.repetitions[0].hashes


@pytest.mark.parametrize(
    "scheme",
    [
        "stale(0) topology=server",
        "stale(0,commit=clock) topology=server(shards=2)",
        "backup(0) topology=server",
        "backup(0) topology=server(shards=3,place=own)",
    ],
)
def test_servers_without_slack_end_with_the_bits_of_the_synchronous_run(tmp_path: Path, scheme: str) -> None:
    """From four ranks on, virtual ranks add in another order than servers do, unless they are told to."""
    synchronous = run(tmp_path / "synchronous", tiny("data=4 topology=direct"))
    served = run(tmp_path / "served", tiny(f"data=4 consistency={scheme}"))
    assert final_bits(served) == final_bits(synchronous)


def test_a_bound_without_end_is_the_asynchronous_run_to_the_last_bit(tmp_path: Path) -> None:
    plans = ("async", "stale(inf,commit=arrival)", "stale(0,commit=arrival)")
    bits = [final_bits(run(tmp_path / str(i), tiny(f"data=4 consistency={plan} topology=server(shards=2)"),
                           stragglers=(Slow(3, 3.0),))) for i, plan in enumerate(plans)]  # fmt: skip
    assert bits[0] == bits[1] != bits[2]
