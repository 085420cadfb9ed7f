"""The faulty group: each fault at its rank and call, in virtual time and on a real process."""

import signal
import subprocess
import sys

import pytest
import torch

from weft.distributed.group import (
    AbstractClock,
    AbstractGroup,
    Delay,
    Drop,
    FaultyGroup,
    Kill,
    SlowLink,
    SlowRank,
    SoloGroup,
)
from weft.distributed.virtual import die, run_virtual
from weft.errors import PeerLostError
from weft.planning.cluster import Link
from weft.planning.network import NetworkModel

NETWORK = NetworkModel(Link(alpha=1.0, beta=0.0))


def three_barriers(group: AbstractGroup) -> list[float]:
    times = []
    for _ in range(3):
        group.barrier()
        times.append(group.clock.now())
    return times


def test_a_delay_holds_up_its_call_alone() -> None:
    healthy = run_virtual(three_barriers, 2, network=NETWORK).results
    late = run_virtual(three_barriers, 2, network=NETWORK, faults=[Delay(1, seconds=5.0, first_call=1)]).results
    assert healthy[0] == [1.0, 2.0, 3.0]
    # Rank 1 comes at 6.0, finds rank 0's token, and is at the third barrier at once.
    assert late == ([1.0, 7.0, 7.0], [1.0, 6.0, 8.0])


def test_a_dropped_message_leaves_the_receiver_waiting_for_its_sender() -> None:
    def program(group: AbstractGroup) -> int:
        if group.rank == 0:
            group.send(torch.ones(1), 1)
            return -1
        try:
            group.recv(torch.zeros(1), 0)
        except PeerLostError as error:
            return error.peer
        return -1

    assert run_virtual(program, 2).results == (-1, -1)
    assert run_virtual(program, 2, faults=[Drop(0)]).results == (-1, 0)


@pytest.mark.parametrize("kill", [Kill(1, at_call=2), Kill(1, after_seconds=2.0)])
def test_a_killed_rank_is_named_by_the_others(kill: Kill) -> None:
    def program(group: AbstractGroup) -> tuple[int, float]:
        try:
            three_barriers(group)
        except PeerLostError as error:
            return error.peer, group.clock.now()
        return -1, group.clock.now()

    result = run_virtual(program, 3, network=NETWORK, faults=[kill], notice=0.5)
    killed_at = 4.0 if kill.at_call else 2.0
    assert result.results == ((1, killed_at + 0.5), None, (1, killed_at + 0.5))


def test_a_slow_rank_computes_longer() -> None:
    def program(group: AbstractGroup) -> float:
        group.clock.charge(2.0)
        return group.clock.now()

    assert run_virtual(program, 2, faults=[SlowRank(1, factor=3.0)]).results == (2.0, 6.0)


def test_a_slow_link_delays_messages_to_one_peer() -> None:
    def program(group: AbstractGroup) -> float:
        message = torch.zeros(4)
        if group.rank == 0:
            group.send(message, 1)
            group.send(message, 2)
        else:
            group.recv(message, 0)
        return group.clock.now()

    slow = SlowLink(0, peer=2, seconds=1.0, seconds_per_byte=0.5)
    assert run_virtual(program, 3, network=NETWORK, faults=[slow]).results[1:] == (1.0, 10.0)


def test_faults_of_other_ranks_change_nothing() -> None:
    group = FaultyGroup(SoloGroup(), [Drop(1), Kill(2, at_call=0), SlowRank(1, 2.0)], die=die)
    tensor = torch.zeros(1)
    group.all_gather(tensor, torch.ones(1))
    assert tensor.item() == 1.0 and type(group.clock).__name__ == "RealClock"


class Stopwatch(AbstractClock):
    """Notes how long it is asked to wait."""

    def __init__(self) -> None:
        self.moment = 0.0

    def now(self) -> float:
        return self.moment

    def charge(self, seconds: float) -> None:
        pass

    def wait_until(self, moment: float) -> None:
        self.moment = moment


def test_a_slow_rank_in_real_time_waits_for_the_difference() -> None:
    clock = Stopwatch()
    FaultyGroup(SoloGroup(clock=clock), [SlowRank(0, factor=1.5)], die=die).clock.charge(2.0)
    assert clock.now() == 1.0


def test_a_real_process_is_killed_without_goodbye() -> None:
    program = (
        "from weft.distributed.group import FaultyGroup, Kill, SoloGroup, kill_this_process\n"
        "group = FaultyGroup(SoloGroup(), [Kill(0, at_call=1)], die=kill_this_process)\n"
        "group.barrier(); print('alive', flush=True); group.barrier(); print('still alive', flush=True)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "alive\n")
