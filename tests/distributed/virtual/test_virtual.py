"""The virtual cluster: time, overlap, contention, determinism, random state, failures, deadlock, trace."""

import json
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from weft.distributed.collectives import AlgorithmChoice
from weft.distributed.group import AbstractGroup, AllReduce, Recv, Send
from weft.distributed.virtual import TraceEvent, VirtualResult, chrome_events, die, run_virtual, write_chrome_trace
from weft.errors import PeerLostError, TrainingError, UsageError
from weft.planning.cluster import Link
from weft.planning.collective_cost import Algorithm, all_reduce_cost
from weft.planning.cost import estimate
from weft.planning.network import NetworkModel

SECOND_A_BYTE = NetworkModel(Link(alpha=0.0, beta=1.0))
RING = AlgorithmChoice("ring")


@pytest.mark.parametrize("size", [2, 3, 6, 8])
@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "tree", "direct"])
def test_an_all_reduce_takes_the_time_of_the_formula(algorithm: str, size: int) -> None:
    def program(group: AbstractGroup) -> float:
        group.all_reduce(torch.ones(24))
        return group.clock.now()

    network = NetworkModel(Link(alpha=3.0, beta=0.5), gamma=0.125)
    result = run_virtual(program, size, network=network, choice=AlgorithmChoice(algorithm))  # type: ignore[arg-type]
    cost = all_reduce_cost(Algorithm(algorithm), size, 96)  # type: ignore[arg-type]
    stated = estimate(cost, 3.0, 0.5, 0.125)
    if algorithm in ("ring", "direct") or size in (2, 8):
        assert max(result.seconds) == pytest.approx(stated)
    else:  # ranks that are not in a round need not wait for it
        assert 0.5 * stated < max(result.seconds) <= stated


def test_computation_hides_communication() -> None:
    def program(group: AbstractGroup, ahead: bool) -> float:
        work = group.start(AllReduce(torch.ones(8)))
        if not ahead:
            work.wait()
        group.clock.charge(20.0)
        work.wait()
        return group.clock.now()

    # The ring of two moves 32 bytes in 32 s.
    seconds = [
        run_virtual(partial(program, ahead=ahead), 2, network=SECOND_A_BYTE, choice=RING).results[0]
        for ahead in (True, False)
    ]
    assert seconds == [32.0, 52.0]


def test_messages_to_one_rank_queue_at_its_port() -> None:
    def program(group: AbstractGroup) -> float:
        if group.rank > 0:
            group.send(torch.zeros(2), 0)
        else:
            for peer in range(1, group.size):
                group.recv(torch.zeros(2), peer)
        return group.clock.now()

    assert run_virtual(program, 4, network=SECOND_A_BYTE).results[0] == 24.0


def busy(group: AbstractGroup) -> tuple[float, float]:
    """Unequal computation, messages, collectives, and random numbers."""
    total = torch.randn(50) * (group.rank + 1)
    for step in range(4):
        group.clock.charge(float(torch.rand(())) * 1e-3)
        work = group.start(AllReduce(total))
        group.clock.charge(1e-4 * ((group.rank + step) % 3))
        work.wait()
    return float(total.sum()), group.clock.now()


def test_the_same_program_gives_the_same_run() -> None:
    runs = []
    for _ in range(3):
        torch.manual_seed(5)
        runs.append(run_virtual(busy, 7, trace=True))
    assert runs[0] == runs[1] == runs[2]
    assert len(runs[0].trace) > 7 * 4


def test_random_state_does_not_leak_between_ranks() -> None:
    def program(group: AbstractGroup) -> list[float]:
        torch.manual_seed(group.rank)
        numbers = []
        for _ in range(3):
            numbers.append(float(torch.rand(())))
            group.barrier()
        return numbers

    state = torch.get_rng_state()
    results = run_virtual(program, 4).results
    for rank, numbers in enumerate(results):
        generator = torch.Generator().manual_seed(rank)
        assert numbers == [float(torch.rand((), generator=generator)) for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), state)


def test_ranks_begin_with_the_random_state_of_the_caller() -> None:
    torch.manual_seed(11)
    wanted = float(torch.rand(()))
    torch.manual_seed(11)
    assert run_virtual(lambda group: float(torch.rand(())), 3).results == (wanted,) * 3


def test_the_first_failure_in_virtual_time_is_raised_with_its_rank() -> None:
    def program(group: AbstractGroup) -> None:
        group.clock.charge(3.0 - group.rank)
        if group.rank < 2:
            raise ValueError(f"rank {group.rank} broke")
        group.barrier()

    before = threading.active_count()
    with pytest.raises(ValueError, match="rank 1 broke") as caught:
        run_virtual(program, 3)
    assert caught.value.__notes__ == ["on rank 1 of 3, after 2 virtual seconds"]
    assert threading.active_count() == before


def test_a_program_that_swallows_everything_still_ends() -> None:
    def program(group: AbstractGroup) -> None:
        if group.rank == 0:
            raise ValueError("broke")
        for _ in range(3):
            try:
                group.barrier()
            except BaseException:
                continue

    with pytest.raises(ValueError, match="broke"):
        run_virtual(program, 3)


def test_a_deadlock_says_who_waits_for_whom() -> None:
    def program(group: AbstractGroup) -> None:
        if group.rank < 2:
            group.recv(torch.zeros(1), 1 - group.rank, tag=4)
        else:
            group.barrier()

    here = r"at \S*test_virtual.py:\d+ in program: group.recv\(.*\)"
    waits = (
        rf"rank 0 waits for rank 1 \(tag 4\) {here}; rank 1 waits for rank 0 \(tag 4\) {here}; rank 2 waits in Barrier"
    )
    with pytest.raises(TrainingError, match=waits):
        run_virtual(program, 3)


def test_collectives_in_different_order_are_a_deadlock() -> None:
    def program(group: AbstractGroup) -> None:
        part = group.split(0, 0)
        for each in (group, part) if group.rank else (part, group):
            each.barrier()

    with pytest.raises(TrainingError, match="rank 1 waits in Barrier for rank 0"):
        run_virtual(program, 2)


def test_a_rank_that_leaves_early_is_lost_to_the_others() -> None:
    def program(group: AbstractGroup) -> str:
        if group.rank == 2:
            return "left"
        try:
            group.barrier()
        except PeerLostError as error:
            return str(error)
        return "done"

    result = run_virtual(program, 3, timeout=7.0)
    assert result.results == (result.results[0], result.results[0], "left")
    assert "rank 2 is lost (rank: 2, it left)" in result.results[0] and result.seconds[0] == 7.0


def test_a_slow_network_is_not_a_silent_peer() -> None:
    def program(group: AbstractGroup) -> float:
        group.all_reduce(torch.ones(100))
        return group.clock.now()

    assert run_virtual(program, 2, network=SECOND_A_BYTE, choice=RING, timeout=10.0).results == (400.0, 400.0)


def test_the_silent_rank_is_named_not_the_one_that_waits_for_it() -> None:
    """In a ring the neighbours of the silent rank fall silent too."""

    def program(group: AbstractGroup) -> int:
        if group.rank == 5:
            group.clock.wait_until(1000.0)
            return 5
        try:
            group.all_reduce(torch.ones(16))
        except PeerLostError as error:
            return error.peer
        return -1

    assert run_virtual(program, 8, choice=RING, timeout=10.0).results == (5,) * 8


def test_a_death_is_noticed_in_every_group_of_the_dead_and_in_no_other() -> None:
    def program(group: AbstractGroup) -> list[int]:
        part = group.split(colour=group.rank % 2, key=0)
        if group.rank == 3:
            die()
        told = []
        for each in (part, group):
            try:
                each.barrier()
                group.clock.charge(2.0)
                each.barrier()
            except PeerLostError as error:
                told.append(error.peer)
        return told

    assert run_virtual(program, 5).results == ([3], [1, 3], [3], None, [3])


def test_messages_that_do_not_fit_are_refused() -> None:
    def program(group: AbstractGroup) -> None:
        if group.rank == 0:
            group.send(torch.zeros(3), 1)
        else:
            group.recv(torch.zeros(4), 0)

    with pytest.raises(UsageError, match="does not fit"):
        run_virtual(program, 2)


def test_a_sent_tensor_may_be_changed_when_the_send_is_done() -> None:
    def program(group: AbstractGroup) -> float:
        tensor = torch.full((4,), float(group.rank))
        if group.rank == 0:
            group.send(tensor, 1)
            tensor.fill_(99.0)
        else:
            group.clock.charge(100.0)
            group.recv(tensor, 0)
        return float(tensor[0])

    assert run_virtual(program, 2).results == (99.0, 0.0)


def test_collectives_run_outside_autograd() -> None:
    """The exchange is carried on by the threads of other ranks, whose gradient mode is their own."""

    def program(group: AbstractGroup) -> list[float]:
        weight = torch.nn.Parameter(torch.full((6,), float(group.rank)))
        with torch.no_grad():
            work = group.start(AllReduce(weight))
        group.clock.charge(1e-6 * group.rank)
        work.wait()
        return weight.detach().tolist()

    assert run_virtual(program, 3).results == ([3.0] * 6,) * 3


def test_time_runs_forward_only_and_computation_is_not_negative() -> None:
    def program(group: AbstractGroup) -> float:
        group.clock.wait_until(-5.0)
        with pytest.raises(UsageError, match="less than no time"):
            group.clock.charge(-1.0)
        return group.clock.now()

    assert run_virtual(program, 2).results == (0.0, 0.0)


def test_a_closed_group_takes_no_calls() -> None:
    def program(group: AbstractGroup) -> None:
        group.close()
        group.start(Send(torch.zeros(1), 1 - group.rank))

    with pytest.raises(UsageError, match="closed"):
        run_virtual(program, 2)


def test_work_is_done_when_its_time_has_come() -> None:
    def program(group: AbstractGroup) -> list[bool]:
        if group.rank == 0:
            group.send(torch.zeros(2), 1)
            return []
        work = group.start(Recv(torch.zeros(2), 0))
        seen = []
        for _ in range(3):
            group.clock.charge(4.0)
            seen.append(work.is_done())
        work.wait()
        return [*seen, group.clock.now() == 12.0]

    assert run_virtual(program, 2, network=SECOND_A_BYTE).results[1] == [False, True, True, True]


def traced() -> VirtualResult:
    def program(group: AbstractGroup) -> None:
        work = group.start(AllReduce(torch.ones(8)))
        group.clock.charge(20.0)
        work.wait()

    return run_virtual(program, 2, network=SECOND_A_BYTE, choice=RING, trace=True)


def test_the_trace_shows_overlap() -> None:
    assert [span for span in traced().trace if span.rank == 0] == [
        TraceEvent(0, 0.0, 20.0, "compute"),
        TraceEvent(0, 0.0, 32.0, "AllReduce", "network"),
        TraceEvent(0, 20.0, 32.0, "wait"),
    ]


def test_the_trace_is_written_for_chrome(tmp_path: Path) -> None:
    trace = traced().trace
    write_chrome_trace(tmp_path / "trace.json", trace)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert events == chrome_events(trace) and len(events) == 6
    assert {"ph": "X", "name": "compute", "pid": 0, "tid": "rank", "ts": 0.0, "dur": 20e6} in events


def test_256_ranks() -> None:
    def program(group: AbstractGroup) -> float:
        total = torch.full((100,), float(group.rank))
        group.all_reduce(total)
        return float(total[99])

    result = run_virtual(program, 256)
    assert set(result.results) == {255 * 128.0}
    assert result.num_switches <= 2 * 256, "ranks were woken for rounds that they need not see"


def test_ctrl_c_ends_the_ranks() -> None:
    """The signal reaches the main thread while it waits for the ranks; the one that runs stops at its next call."""

    def program(group: AbstractGroup) -> None:
        if group.rank == 0:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        while True:  # until it is stopped
            group.barrier()
            time.sleep(0)

    with pytest.raises(KeyboardInterrupt):
        run_virtual(program, 2)


def test_a_machine_without_threads_is_an_error_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def start_few(thread: threading.Thread) -> None:
        if thread.name == "virtual rank 2":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_few)
    with pytest.raises(RuntimeError, match="can't start"):
        run_virtual(busy, 4)
