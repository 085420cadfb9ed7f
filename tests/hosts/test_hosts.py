"""Test hosts: apart from each other and from this machine, at the rate that was asked for, and gone in the end."""

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.hosts import RATES, Hosts, can_make_hosts, make_hosts
from benchmarks.hosts.network import host_commands, link_commands, rate_commands

MAKER = """
import os, sys
from benchmarks.hosts import make_hosts
with make_hosts(1) as (host,):
    print(host.process, flush=True)
    host.start(["sleep", "1000"])
    if sys.argv[1] == "raise":
        raise ValueError("planted")
    os.kill(os.getpid(), int(sys.argv[1]))
"""


def test_a_host_has_its_own_name_memory_processes_and_network(hosts: Hosts) -> None:
    Path("/dev/shm/weft-test").touch()
    try:
        told = hosts.run_all([["sh", "-c", "hostname; ls /dev/shm; ls /sys/class/net | xargs; echo $$"]] * 2)
    finally:
        Path("/dev/shm/weft-test").unlink()
    for number, answer in enumerate(told):
        name, *files, devices, process = answer.stdout.splitlines()
        assert (name, files, devices) == (f"host{number}", ["hosts", "tmp"], "eth0 lo")
        assert int(process) < 100
    assert socket.gethostname() != "host0"


def test_bytes_are_counted_where_they_leave_and_where_they_arrive(hosts: Hosts) -> None:
    this = [sys.executable, "-c"]
    receive = (
        f"import socket; c = socket.create_server(('{hosts[1].address}', 7000)).accept()[0]\nwhile c.recv(9999): pass"
    )
    send = (
        "import socket, time\nwhile True:\n    try: c = socket.create_connection(('node1', 7000)); break\n"
        "    except ConnectionRefusedError: time.sleep(0.01)\nc.sendall(bytes(10**6))"
    )
    sent, received = hosts[0].count_bytes()[0], hosts[1].count_bytes()[1]
    assert [done.returncode for done in hosts.run_all([[*this, send], [*this, receive]])] == [0, 0]
    for num_bytes in (hosts[0].count_bytes()[0] - sent, hosts[1].count_bytes()[1] - received):
        assert 1_000_000 < num_bytes < 1_100_000


def test_the_rate_holds_at_both_ends_of_a_link(hosts: Hosts) -> None:
    shown = hosts[0].start(["tc", "qdisc", "show", "dev", "eth0"], stdout=subprocess.PIPE).communicate()[0]
    assert "tbf" in shown
    assert "rate 1Gbit" in shown
    assert all(rate_commands("port0", rate) for rate in RATES if rate != "unlimited")


def test_a_signal_reaches_the_command_and_its_exit_code_comes_back(hosts: Hosts) -> None:
    started = hosts[1].start(["sh", "-c", "trap 'exit 7' INT; echo up; while :; do sleep 0.01; done"], stdout=-1)
    assert started.stdout is not None
    assert started.stdout.readline() == "up\n"
    hosts[1].signal(started, signal.SIGINT)
    assert started.wait(10) == 7
    started.stdout.close()


def test_what_does_not_end_in_time_is_ended(hosts: Hosts) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        hosts.run_all([["sleep", "1000"]] * 2, timeout=0.1)


@pytest.mark.parametrize("end", ["raise", str(int(signal.SIGKILL)), str(int(signal.SIGINT))])
def test_nothing_is_left_of_hosts_whose_maker_is_gone(hosts: Hosts, end: str) -> None:
    maker = subprocess.Popen([sys.executable, "-c", MAKER, end], stdout=-1, stderr=-1, text=True)
    assert maker.stdout is not None
    holder = os.pidfd_open(int(maker.stdout.readline()))
    try:
        assert maker.wait(20) != 0
        _await_end(holder)
    finally:
        os.close(holder)
        maker.communicate()


def _await_end(process: int) -> None:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    assert poll.poll(10_000), "the first process of the host, without which it has none, is still there"


def test_a_rate_that_no_link_has_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown rate"), make_hosts(1, "2gbit"):
        pass


def test_the_reason_is_told_where_hosts_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert can_make_hosts.__wrapped__() == "no ip on this machine (apt-get install iproute2)"


def test_a_host_gets_one_end_of_a_link() -> None:
    assert link_commands(3, 77)[0] == "link add port3 type veth peer name eth0 netns 77"
    assert "address add 10.213.0.4/24 dev eth0" in host_commands(3)
