"""A rank program that tells what a process is like in which it runs: all that could change a result."""

import gc
import hashlib
import os
import random
import signal
import sys
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn

OF_ONE_LAUNCH = ("WEFT_MEETING", "WEFT_STARTER", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


def tell_state() -> dict[str, Any]:
    return {
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), torch.__config__.parallel_info()],
        "numerics": [
            str(torch.get_default_dtype()),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.backends.mkldnn.enabled,
        ],
        "bits": compute(),
        "path": sys.path,
        "folder": os.getcwd(),
        "flags": [str(sys.flags), sys.getrecursionlimit(), gc.isenabled(), gc.get_threshold()],
        "warnings": [str(f) for f in warnings.filters],
        "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
        "session": os.getsid(0) == os.getpid(),
        "descriptors": sorted(int(d) for d in os.listdir("/proc/self/fd"))[:-1],
        "streams": [[s.encoding, s.errors, s.line_buffering, s.fileno()] for s in (sys.stdout, sys.stderr)],
        "input": os.readlink("/proc/self/fd/0"),
        "environment": {k: v for k, v in os.environ.items() if k not in OF_ONE_LAUNCH},
    }


def tell_entropy() -> list[Any]:
    """What must differ between processes."""
    return [random.random(), np.random.rand(), torch.rand(1).item()]


def tell_packages() -> list[str]:
    return sorted({name.partition(".")[0] for name in sys.modules})


def compute() -> str:
    """The bits of products, convolutions, an LSTM and their gradients, and of numpy's products."""
    torch.manual_seed(7)
    digest = hashlib.sha256()
    models = [nn.Linear(300, 200), nn.Conv2d(3, 16, 3), nn.LSTM(40, 30)]
    inputs = [torch.randn(500, 300), torch.randn(8, 3, 32, 32), torch.randn(20, 8, 40)]
    for model, value in zip(models, inputs, strict=True):
        result = model(value)
        result = result[0] if isinstance(result, tuple) else result
        result.square().sum().backward()
        for tensor in (result, *(p.grad for p in model.parameters())):
            digest.update(tensor.detach().numpy().tobytes())
    matrix = np.random.RandomState(3).rand(600, 600)
    digest.update((matrix @ matrix).tobytes())
    digest.update(np.linalg.svd(matrix[:100, :100])[1].tobytes())
    return digest.hexdigest()
