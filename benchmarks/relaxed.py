"""Training that does not wait for the slowest: one slow rank of four, servers of many bytes, 1000 virtual ranks.

    python -m benchmarks.relaxed [--only slow,servers,virtual] [--out benchmarks/results/relaxed.json]

slow      `digits_cnn` to 94% of the validation set on 4 real ranks, of which one sleeps twice the time of its own
          computation in every step, so that it is three times as slow. Torch's DistributedDataParallel, Weft's
          synchronous ranks, then each scheme, in turn, for each seed.
servers   2 workers push gradients of 25 million float32 and take the weights back, through one server, two and four;
          the same bytes by an all-reduce, Weft's and Gloo's; and through torch RPC with the same update. Seconds of a
          step of the slowest worker.
virtual   1000 workers of the virtual cluster, asynchronous, `digits_mlp`: real seconds for a thousand updates.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor

from weft.atomic import write_json
from weft.distributed.consistency.server import ServedReplicas, settings_of
from weft.distributed.place import Launch, find_launch, open_group, open_launched_mailbox
from weft.engines.local import run_ranks
from weft.engines.rank_program import RankProgram
from weft.engines.tolerance import tolerance_of
from weft.graph import State
from weft.metrics.statistics import ratio_interval, ratio_of_medians
from weft.recipes import find_recipe
from weft.records.machine import describe_machine, describe_source, describe_versions
from weft.records.record_file import read_record
from weft.records.run_folder import create_run_folder
from weft.records.strict_json import encode_json
from weft.runs.job import with_plan, with_settings
from weft.simulation.simulation import simulate
from weft.specs import parse_plan
from weft.training.optimizers import SGD, Optimizer
from weft.training.replicas import Update

__all__ = ["main", "reduce_rank", "rpc_rank", "serve_rank"]

RESULT = Path(__file__).parent / "results" / "relaxed.json"
SLOW_SETTINGS = (
    "batch_size=128",
    "optimizer=adam",
    "optimizer.lr=2e-3",
    "epochs=60",
    "evaluate_every=0.5",
    "target=accuracy:0.94",
)
DDP = "torch DDP, Gloo"
SCHEMES = {
    "synchronous": "data=4",
    "asynchronous": "data=4 consistency=async(full) topology=server(shards=1,place=own)",
    "stale-synchronous": "data=4 consistency=stale(3,commit=arrival,lr=full) topology=server(shards=1,place=own)",
    "backup workers": "data=4 consistency=backup(1) topology=server(shards=1,place=own)",
}
NUM_ELEMENTS, NUM_ROUNDS, NUM_TURNS = 25_000_000, 4, 3
VIRTUAL_RANKS = 1000

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="slow,servers,virtual")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    parts: dict[str, Callable[[], list[Row]]] = {
        "slow": lambda: measure_slow(options.seeds),
        "servers": measure_servers,
        "virtual": measure_virtual,
    }
    about: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": describe_machine()}
    about |= {"versions": describe_versions(), "source": describe_source()}
    rows = [row for name in options.only.split(",") for row in parts[name]()]
    write_json(options.out, encode_json({**about, "rows": rows}))


# ---- one slow rank


def measure_slow(num_seeds: int) -> list[Row]:
    """Seconds to the target, and accuracies on the test set, by system."""
    times: dict[str, list[float]] = {name: [] for name in (DDP, *SCHEMES)}
    accuracies: dict[str, list[float]] = {name: [] for name in times}
    for seed in range(num_seeds):
        for name in times:
            seconds, accuracy = _train_with_ddp(seed) if name == DDP else _train_with_weft(SCHEMES[name], seed)
            times[name].append(seconds)
            accuracies[name].append(accuracy)
            print(f"seed {seed}  {name:20}{seconds:8.2f} s  {accuracy:.4f}", flush=True)
    case = "digits_cnn to 94%, one of 4 ranks three times as slow"
    return [
        {**_row(case, name, "s to target", times, DDP), "test_accuracy": median(accuracies[name])} for name in times
    ]


def _train_with_weft(plan: str, seed: int) -> tuple[float, float]:
    recipe = with_plan(with_settings(find_recipe("digits_cnn"), SLOW_SETTINGS), plan, None)
    chosen = recipe.mutable.plan
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"recipe": recipe.to_dict(), "folder": folder, "seed": seed}
        program = RankProgram("benchmarks.stragglers.sleepy:train_slow_rank", arguments)
        found = run_ranks(program, chosen.roles.num_processes, tolerance=tolerance_of(chosen))
        values = read_record(Path(folder)).repetitions[0].values
    return float("inf") if found[0] is None else found[0], values["test/accuracy"]


def _train_with_ddp(seed: int) -> tuple[float, float]:
    recipe = with_settings(find_recipe("digits_cnn"), SLOW_SETTINGS)
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"recipe": recipe.to_dict(), "folder": folder, "seed": seed}
        seconds, accuracy = run_ranks(RankProgram("benchmarks.stragglers.ddp:train_ddp_rank", arguments), 4)[0]
    return seconds, accuracy


# ---- servers and bytes


def measure_servers() -> list[Row]:
    """Milliseconds of a step, by system; the systems take turns."""
    systems: dict[str, tuple[str, int, dict[str, Any]]] = {
        "weft, one server": ("serve_rank", 3, {"shards": 1, "kind": "shared_memory"}),
        "weft, two servers": ("serve_rank", 4, {"shards": 2, "kind": "shared_memory"}),
        "weft, four servers": ("serve_rank", 6, {"shards": 4, "kind": "shared_memory"}),
        "weft, one server, TCP": ("serve_rank", 3, {"shards": 1, "kind": "tcp"}),
        "torch RPC, one server": ("rpc_rank", 3, {}),
        "weft, all-reduce": ("reduce_rank", 2, {"kind": "shared_memory"}),
        "gloo, all-reduce": ("reduce_rank", 2, {"kind": "torch"}),
    }
    times: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(NUM_TURNS):
        for name, (function, num_ranks, arguments) in systems.items():
            found = run_ranks(RankProgram(f"benchmarks.relaxed:{function}", arguments), num_ranks)
            times[name] += [1e3 * max(values) for values in zip(*found[:2], strict=True)]
            print(f"{name:24}{median(times[name]):9.1f} ms", flush=True)
    case = f"2 workers, {4 * NUM_ELEMENTS / 1e6:.0f} MB"
    return [_row(case, name, "ms a step", times, "torch RPC, one server") for name in systems]


def serve_rank(shards: int, kind: str) -> list[float]:
    """The rank program of servers: every worker pushes and pulls in rounds."""
    from weft.distributed.consistency.server import ServerSpec, make_policy, serve

    torch.set_num_threads(1)
    place = find_launch()
    plan = parse_plan(f"data=2 consistency=async topology=server(shards={shards},place=own)")
    optimizer = Optimizer(SGD(), lr=0.01)
    mailbox = open_launched_mailbox(place, kind)  # type: ignore[arg-type]
    try:
        if place.rank >= 2:
            serve(
                mailbox,
                ServerSpec(
                    shard=place.rank - 2,
                    plan=str(plan),
                    settings=settings_of(plan, optimizer),
                    make_policy=lambda _seed, _fresh: make_policy(plan.consistency, 2),
                    make_optimizer=lambda _fraction: optimizer,
                ),
            )
            return []
        return _push_and_pull(ServedReplicas(mailbox, settings_of(plan, optimizer), [0]), optimizer)
    finally:
        mailbox.close()


def _push_and_pull(replicas: ServedReplicas, optimizer: Optimizer) -> list[float]:
    parameters = {"w": torch.zeros(NUM_ELEMENTS, requires_grad=True)}
    gradient, seconds = torch.ones(NUM_ELEMENTS), []
    state = optimizer.init(parameters)
    replicas.join(State(parameters, {}, torch.zeros(0)))
    for _ in range(NUM_ROUNDS + 1):
        began = time.perf_counter()
        replicas.begin(0.5)("w", gradient)
        replicas.finish(0.0, Update(optimizer, parameters, state, 0.01, None))
        seconds.append(time.perf_counter() - began)
    replicas.sum(torch.zeros(1))
    return seconds[1:]


def reduce_rank(kind: str) -> list[float]:
    """The rank program of the all-reduce of as many bytes."""
    torch.set_num_threads(1)
    group = open_group(find_launch(), kind)  # type: ignore[arg-type]
    gradient, seconds = torch.ones(NUM_ELEMENTS), []
    try:
        for _ in range(NUM_ROUNDS + 1):
            group.barrier()
            began = time.perf_counter()
            group.all_reduce(gradient)
            seconds.append(time.perf_counter() - began)
    finally:
        group.close()
    return seconds[1:]


_held: dict[str, Tensor] = {}


def _update_remotely(gradient: Tensor) -> Tensor:
    weights = _held.setdefault("w", torch.zeros(NUM_ELEMENTS))
    weights.add_(gradient, alpha=-0.005)
    return weights


def rpc_rank() -> list[float]:
    """The rank program of torch RPC: the same update, by a call that returns the weights."""
    torch.set_num_threads(1)
    place: Launch = find_launch()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{place.meeting}/rpc", rpc_timeout=300)
    rpc.init_rpc(f"rank-{place.rank}", rank=place.rank, world_size=place.size, rpc_backend_options=options)
    seconds = []
    if place.rank < 2:
        gradient = torch.ones(NUM_ELEMENTS)
        for _ in range(NUM_ROUNDS + 1):
            began = time.perf_counter()
            rpc.rpc_sync("rank-2", _update_remotely, args=(gradient,))
            seconds.append(time.perf_counter() - began)
    rpc.shutdown()
    return seconds[1:]


# ---- many virtual ranks


def measure_virtual() -> list[Row]:
    """Real seconds for a thousand updates of 1000 virtual workers; what comes before and after is in them."""
    plan = f"data={VIRTUAL_RANKS} consistency=async topology=server"
    settings = ("batch_size=1000", "epochs=4", "evaluate_every=4")
    recipe = with_plan(with_settings(find_recipe("digits_mlp"), settings), plan, None)
    with tempfile.TemporaryDirectory() as folder:
        simulation = simulate(recipe, folder=create_run_folder(Path(folder) / "run", recipe.name), compute=0.01)
    updates = sum(simulation.record.repetitions[0].series["staleness"])
    per_thousand = simulation.real_seconds / updates * 1000
    print(f"{VIRTUAL_RANKS} virtual ranks: {updates:.0f} updates, {per_thousand:.2f} s for a thousand")
    unit = "s for a thousand updates"
    return [_row(f"{VIRTUAL_RANKS} virtual ranks", "asynchronous", unit, {"asynchronous": [per_thousand]})]


def _row(case: str, name: str, unit: str, values: Mapping[str, Sequence[float]], peer: str = "") -> Row:
    """The median, and how many times as fast that is as the peer."""
    row: Row = {"benchmark": "relaxed", "case": case, "system": name, "median": round(median(values[name]), 3)}
    row["unit"] = unit
    if peer:
        ratio, interval = ratio_of_medians(values[peer], values[name]), ratio_interval(values[peer], values[name])
        row |= {"as": peer, "times_as_fast": round(ratio, 3)}
        row["interval_of_times_as_fast"] = [round(interval.low, 3), round(interval.high, 3)]
    return {**row, "raw": [round(value, 4) for value in values[name]]}


if __name__ == "__main__":
    main()
