"""Test hosts on this machine: each with its own network, processes, shared memory and name, joined at a given rate."""

from benchmarks.hosts.hosts import Host, Hosts, can_make_hosts, make_hosts
from benchmarks.hosts.network import RATES

__all__ = ["RATES", "Host", "Hosts", "can_make_hosts", "make_hosts"]
