"""The network between test hosts, as commands for `ip` and `tc`: a star of links around one switch, each of one rate.

    switch                                             host 0                 host 1
    +---------------------------------+          +------------------+   +------------------+
    | bridge ---- port0 (tbf) <-------- veth ------> eth0 (tbf)     |   |  eth0 (tbf)      |
    |        \\--- port1 (tbf) <-------- veth --------------------------->                  |
    +---------------------------------+          |  10.213.0.1      |   |  10.213.0.2      |
                                                 +------------------+   +------------------+

`tbf` on eth0 limits what a host sends; on its port, what it receives. The switch is in a namespace of its own, and the
addresses are known nowhere else: the network of the machine is not touched.

Line rates that `python -m benchmarks.hosts.line_rate` measured, one plain socket from host to host:

    100mbit      12.0 MB/s
      1gbit     119.8 MB/s
     10gbit    1198   MB/s
  unlimited    2792   MB/s
"""

__all__ = ["RATES", "address_of", "host_commands", "link_commands", "names_of", "rate_commands", "switch_commands"]

RATES = {"100mbit": "64kb", "1gbit": "256kb", "10gbit": "4mb", "unlimited": ""}
"""Rates that links may have, and the bytes that `tbf` lets through at once: a timer's tick of the line, and more than
the 64 kB that one piece from TCP has."""

LATENCY = "50ms"  # of a full queue; what does not fit is dropped, and TCP slows down
NETWORK = "10.213.0"


def address_of(host: int) -> str:
    """
    >>> address_of(0)
    '10.213.0.1'
    """
    return f"{NETWORK}.{host + 1}"


def names_of(num_hosts: int) -> str:
    """Lines of /etc/hosts: `node0`, `node1` and so on, as every host knows them.

    >>> names_of(2)
    '10.213.0.1 node0\\n10.213.0.2 node1\\n'
    """
    return "".join(f"{address_of(host)} node{host}\n" for host in range(num_hosts))


def switch_commands() -> list[str]:
    """For `ip -batch` in the namespace of the switch."""
    return ["link set lo up", "link add bridge type bridge", "link set bridge up"]


def link_commands(host: int, process: int) -> list[str]:
    """For `ip -batch` in the namespace of the switch: a port, whose other end is in the namespace of a process."""
    return [
        f"link add port{host} type veth peer name eth0 netns {process}",
        f"link set port{host} master bridge",
        f"link set port{host} up",
    ]


def host_commands(host: int) -> list[str]:
    """For `ip -batch` in the namespace of a host."""
    return ["link set lo up", f"address add {address_of(host)}/24 dev eth0", "link set eth0 up"]


def rate_commands(device: str, rate: str) -> list[str]:
    """For `tc -batch`, where the device is.

    >>> rate_commands("eth0", "1gbit")
    ['qdisc add dev eth0 root tbf rate 1gbit burst 256kb latency 50ms']
    >>> rate_commands("eth0", "unlimited")
    []
    """
    return [f"qdisc add dev {device} root tbf rate {rate} burst {RATES[rate]} latency {LATENCY}"] if RATES[rate] else []
