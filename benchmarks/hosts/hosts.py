"""Hosts that exist while a block runs: processes, shared memory, name and network of each are its own.

    maker --- pipe ---> holder: the first process of the host's namespaces, which only waits
                        command, command, ...   what is started on the host

The namespaces have no names: they are there as long as their holder is, and so is all that was started in them. The
holder ends when the pipe does, which is when the maker closes it or is gone, however it went. So nothing is ever left
behind, and runs at the same time do not meet.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, final

from benchmarks.hosts.network import (
    RATES,
    address_of,
    host_commands,
    link_commands,
    names_of,
    rate_commands,
    switch_commands,
)

__all__ = ["Host", "Hosts", "can_make_hosts", "make_hosts"]

TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
SPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")
MEMORY = "/dev/shm"
END_SECONDS = 10.0

# Its own counters of the network, its own shared memory, with a folder for temporary files in it, and names of hosts.
HOLD = f"""mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs {MEMORY} && mkdir {MEMORY}/tmp
hostname "$1" && echo "$2" > {MEMORY}/hosts && mount --bind {MEMORY}/hosts /etc/hosts && echo up && cat"""


@final
class Host:
    """One host.

    Args:
        name: the host name; as on many machines, the host itself takes it for loopback, and no other knows it.
        address: on the network of the hosts.
        process: the holder, as this machine numbers it.
    """

    def __init__(self, name: str, address: str, process: int) -> None:
        self.name, self.address, self.process = name, address, process

    def start(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a command here, in this folder, with the variables of this process and those given.

        Args:
            options: of subprocess.Popen.
        """
        entering = ["nsenter", "--target", str(self.process), *SPACES, f"--wdns={os.getcwd()}", "--", *command]
        variables = {**os.environ, "TMPDIR": f"{MEMORY}/tmp", **(environment or {})}
        return subprocess.Popen(entering, env=variables, text=True, **{"stdin": subprocess.DEVNULL, **options})

    def signal(self, started: "subprocess.Popen[str]", number: int) -> None:
        """Send a signal to a command; the process that was started here only waits for it outside."""
        for child in _children_of(started.pid):
            os.kill(child, number)

    def count_bytes(self) -> tuple[int, int]:
        """Sent and received by this host since it was made, with all headers but those of a piece that the kernel
        sends as several packets (52 bytes of 1500)."""
        lines = Path(f"/proc/{self.process}/net/dev").read_text().splitlines()
        (fields,) = (line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:"))
        return int(fields[8]), int(fields[0])

    def apply(self, tool: str, commands: Sequence[str]) -> None:
        """Carry out commands of `ip` or `tc` in this host's network."""
        if commands:
            entering = ["nsenter", "--target", str(self.process), "--net", "--", tool, "-batch", "-"]
            done = subprocess.run(entering, input="\n".join(commands) + "\n", text=True, capture_output=True)
            if done.returncode:
                raise OSError(f"{tool} failed ({done.stderr.strip()})")


@final
class Hosts(tuple[Host, ...]):
    """Hosts that reach each other."""

    def run_all(
        self,
        commands: Sequence[Sequence[str]],
        environment: Mapping[str, str] | None = None,
        *,
        timeout: float = 300.0,
    ) -> list["subprocess.CompletedProcess[str]"]:
        """Run a command on each host at the same time, until all have ended; output and exit codes by host.

        Raises:
            subprocess.TimeoutExpired: one has not ended in time.
        """
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started = [h.start(command, environment, **piped) for h, command in zip(self, commands, strict=True)]
        try:
            # One that prints much before another has ended only waits: pipes are read one after the other.
            outputs = [process.communicate(timeout=timeout) for process in started]
        finally:
            for host, process in zip(self, started, strict=True):
                if process.poll() is None:
                    host.signal(process, signal.SIGKILL)
                    process.communicate()
        return [subprocess.CompletedProcess(p.args, p.returncode, *o) for p, o in zip(started, outputs, strict=True)]


@contextmanager
def make_hosts(num_hosts: int, rate: str = "unlimited") -> Iterator[Hosts]:
    """So many hosts on one network, gone when the block ends, with whatever still runs on them.

    Args:
        rate: at which each sends and, at the same time, receives: one of RATES.

    Raises:
        OSError: hosts cannot be made here; `can_make_hosts` tells why.
    """
    if rate not in RATES:
        raise ValueError(f"unknown rate ({rate}); use one of {', '.join(RATES)}")
    with ExitStack() as stack:
        switch = stack.enter_context(_hold("switch", "", ""))
        nodes = names_of(num_hosts)
        hosts = Hosts(stack.enter_context(_hold(f"host{i}", address_of(i), nodes)) for i in range(num_hosts))
        links = [command for i, host in enumerate(hosts) for command in link_commands(i, host.process)]
        switch.apply("ip", [*switch_commands(), *links])
        switch.apply("tc", [command for i in range(num_hosts) for command in rate_commands(f"port{i}", rate)])
        for i, host in enumerate(hosts):
            host.apply("ip", host_commands(i))
            host.apply("tc", rate_commands("eth0", rate))
        yield hosts


@cache
def can_make_hosts() -> str | None:
    """Why hosts cannot be made here; None where they can, which is found out by making two."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no {missing[0]} on this machine (apt-get install {TOOLS[missing[0]]})"
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    try:
        with make_hosts(2, "1gbit"):
            return None
    except OSError as error:
        return f"network namespaces cannot be made here: {error}"


@contextmanager
def _hold(name: str, address: str, nodes: str) -> Iterator[Host]:
    names = f"127.0.0.1 localhost\n127.0.1.1 {name}\n{nodes}"
    command = ["unshare", *SPACES, "--fork", "--mount-proc", "--kill-child", "sh", "-c", HOLD, "sh", name, names]
    pipe = subprocess.PIPE
    # A session of its own: the terminal's Ctrl-C is for the maker, who may still have to talk with the host.
    holder = subprocess.Popen(command, text=True, start_new_session=True, stdin=pipe, stdout=pipe, stderr=pipe)
    assert holder.stdin and holder.stdout and holder.stderr
    try:
        if holder.stdout.readline() != "up\n":
            holder.wait()
            raise OSError(holder.stderr.read().strip() or "the host did not come up")
        (first,) = _children_of(holder.pid)
        yield Host(name, address, first)
    finally:
        holder.stdin.close()
        try:
            holder.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            holder.kill()
            holder.wait()
        holder.stdout.close()
        holder.stderr.close()


def _children_of(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
