"""PyTorch's own suite for backends of torch.distributed, in the installed package, with our name in the place of Gloo's.

Its tests start three processes each, which import torch every time: here three ranks go through all of them, and a
fresh process group is made for each.
"""

import io
import os
import re
import sys
import tempfile
import time
import traceback
import types
import unittest
import warnings
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from weft.distributed.torch_backend import register

MODULE = "torch.testing._internal.distributed.distributed_test"
NUM_RANKS = 3


def run(names: list[str], backend: str) -> dict[str, str]:
    """How each test ended on this rank: `passed`, `skipped: why`, or the traceback."""
    folder = Path(os.environ["WEFT_MEETING"])
    register()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        suite = load(backend, folder)
        return {name: _run_one(suite, name, backend, folder) for name in names or names_of(suite)}


def load(backend: str, folder: Path) -> Any:
    """The module with another backend's name for Gloo's: its tests look at the name to see what to skip."""
    os.environ |= {"BACKEND": backend, "WORLD_SIZE": str(NUM_RANKS), "TEMP_DIR": str(folder)}
    os.environ["INIT_METHOD"] = f"file://{folder}/store-again"  # for the test that makes its own group
    if find_spec("expecttest") is None:  # torch's test cases derive from it; none here uses what it adds
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase
    spec = find_spec(MODULE)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    if backend != "gloo":
        from torch.testing._internal.common_distributed import DistTestCases

        # What DDP logs of Gloo's own settings stays Gloo's.
        source = re.sub(r'(?<!== )"gloo"', f'"{backend}"', source).replace("Backend.GLOO", f"Backend.{backend.upper()}")
        source = re.sub(r'BACKEND == "gloo"', f'BACKEND == "{backend}"', source)
        for feature in ("ddp", "subgroup", "gpu", "cuda"):
            DistTestCases.backend_feature[feature].add(backend)
        source = source.replace("dist.monitored_barrier(", "monitored_barrier(")
    module = types.ModuleType(MODULE)
    module.monitored_barrier = _monitored_barrier
    module.__file__ = spec.origin
    sys.modules[MODULE] = module
    exec(compile(source, spec.origin, "exec"), module.__dict__)
    return module


def _monitored_barrier(*arguments: Any, **named: Any) -> None:
    """torch's own, which looks at nothing but the name to see whether a backend has it."""
    with mock.patch.object(dist.Backend, "GLOO", dist.get_backend()):
        dist.monitored_barrier(*arguments, **named)


def names_of(suite: Any) -> list[str]:
    case = _make_case(suite)
    return sorted(name for name in dir(case) if name.startswith("test_"))


def _make_case(suite: Any) -> Any:
    return type("TestDistBackend", (suite.TestDistBackend, suite.DistributedTest._DistTestBase), {})


def _run_one(suite: Any, name: str, backend: str, folder: Path) -> str:
    rank = int(os.environ["WEFT_RANK"])
    case = _make_case(suite)(name)
    if getattr(getattr(case, name), "__unittest_skip__", False):
        return f"skipped: {getattr(case, name).__unittest_skip_why__}"
    own = folder / name
    for part in ("barrier", "test_dir"):
        (own / part).mkdir(parents=True, exist_ok=True)
    os.environ["TEMP_DIR"] = str(own)
    suite.Barrier.barrier_id = 0
    case.rank, case.file_name = rank, str(own / "store")
    seconds = suite.CUSTOM_PG_TIMEOUT.get(name, suite.default_pg_timeout)
    begin = time.monotonic()
    try:
        dist.init_process_group(
            backend, init_method=case.init_method, world_size=NUM_RANKS, rank=rank, timeout=timedelta(seconds=seconds)
        )
        case._barrier(timeout=60)
        torch.manual_seed(1234)
        getattr(case, name)()
        case._barrier(timeout=60)
        result = "passed"
    except unittest.SkipTest as skip:
        result = f"skipped: {skip}"
    except SystemExit as skip:
        from torch.testing._internal.common_distributed import TEST_SKIPS

        result = f"skipped: {next(known.message for known in TEST_SKIPS.values() if known.exit_code == skip.code)}"
    except BaseException:
        result = traceback.format_exc()
    if dist.is_initialized():
        dist.destroy_process_group()
    print(f"{name} {time.monotonic() - begin:.2f} s {result.splitlines()[-1][:200]}", flush=True)
    return result
