"""Memory that a step frees: the setting is made in a process of its own, for it stays until the process ends."""

import subprocess
import sys

import pytest

FAULTS = """
import resource
import torch
from weft.training.process import keep_freed_memory

NUM_BYTES = 40 * 2**20  # above the 32 MiB from which glibc always maps anew

def count_faults():
    for _ in range(16):  # until the heap has its shape
        torch.ones(NUM_BYTES // 4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(NUM_BYTES // 4)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() / NUM_BYTES

print(count_faults())
assert keep_freed_memory()
print(count_faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the setting is one of glibc")
def test_a_freed_tensor_is_used_again() -> None:
    """And without the setting, it is not."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    without, kept = map(float, done.stdout.split())
    assert 3.5 <= without <= 5.0
    assert kept <= 0.5
