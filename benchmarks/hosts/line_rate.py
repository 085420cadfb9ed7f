"""How much a plain socket carries from one test host to another, for each rate.

python -m benchmarks.hosts.line_rate
"""

import argparse
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks.hosts.hosts import can_make_hosts, make_hosts
from benchmarks.hosts.network import RATES

__all__ = ["measure"]

PORT = 29400
CHUNK = 1 << 20
BYTES = {"100mbit": 20_000_000, "1gbit": 200_000_000, "10gbit": 1_000_000_000, "unlimited": 2_000_000_000}


def measure(rate: str, num_bytes: int) -> float:
    """Bytes in a second, from host 0 to host 1."""
    with make_hosts(2, rate) as hosts:
        this = [sys.executable, "-m", "benchmarks.hosts.line_rate"]
        receiver = hosts[1].start([*this, "--receive", hosts[1].address], stdout=subprocess.PIPE)
        assert receiver.stdout is not None
        receiver.stdout.readline()
        sender = hosts[0].start([*this, "--send", hosts[1].address, "--bytes", str(num_bytes)])
        (last,) = receiver.communicate(timeout=120)[0].splitlines()
        sender.wait(10)
        return float(last)


def _receive(address: str) -> None:
    with socket.create_server((address, PORT)) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
        buffer, begin, total = bytearray(CHUNK), 0.0, 0
        while num_bytes := connection.recv_into(buffer):
            begin = begin or time.perf_counter()
            total += num_bytes
        print(total / (time.perf_counter() - begin), flush=True)


def _send(address: str, num_bytes: int) -> None:
    with socket.create_connection((address, PORT)) as connection:
        for _ in range(num_bytes // CHUNK):
            connection.sendall(bytes(CHUNK))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--receive", metavar="ADDRESS")
    parser.add_argument("--send", metavar="ADDRESS")
    parser.add_argument("--bytes", type=int, default=CHUNK)
    parser.add_argument("--repeat", type=int, default=3)
    chosen = parser.parse_args(arguments)
    if chosen.receive:
        _receive(chosen.receive)
    elif chosen.send:
        _send(chosen.send, chosen.bytes)
    else:
        if reason := can_make_hosts():
            sys.exit(f"no test hosts: {reason}")
        for rate in RATES:
            found = statistics.median(measure(rate, BYTES[rate]) for _ in range(chosen.repeat))
            print(f"{rate:>9}  {found / 1e6:8.1f} MB/s  {8 * found / 1e6:8.1f} Mbit/s")


if __name__ == "__main__":
    main()
