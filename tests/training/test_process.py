"""Memory that a step frees: the setting is made in a process of its own, for it stays until the process ends."""

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import torch
if sys.argv[1] == "keep":
    from weft.training.process import keep_freed_memory
    assert keep_freed_memory()
NUM_BYTES = 40 * 2**20  # above the 32 MiB from which glibc always maps anew
for _ in range(16):  # until the heap has its shape
    torch.ones(NUM_BYTES // 4)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    torch.ones(NUM_BYTES // 4)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() / NUM_BYTES)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the setting is one of glibc")
@pytest.mark.parametrize(("setting", "low", "high"), [("keep", 0.0, 0.5), ("leave", 3.5, 5.0)])
def test_a_freed_tensor_is_used_again(setting: str, low: float, high: float) -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS, setting], capture_output=True, text=True, check=True)
    assert low <= float(done.stdout) <= high
