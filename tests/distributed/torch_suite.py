"""PyTorch's own suite for backends, from the installed package, with our name in the place of Gloo's.

There each test starts its processes, which import torch every time. Here the ranks go through all of them, and make a
process group for each.
"""

import os
import re
import sys
import traceback
import types
import unittest
import warnings
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from weft.distributed.torch_backend import register

MODULE = "torch.testing._internal.distributed.distributed_test"
BARRIER_SECONDS = 60


def run(backend: str, names: list[str], left_out: list[str]) -> dict[str, str]:
    """How each test ended on this rank, all where none are named: `passed`, `skipped: why`, or the traceback."""
    folder = Path(os.environ["WEFT_MEETING"])
    register()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        suite = load(backend, folder)
        case = type("TestDistBackend", (suite.TestDistBackend, suite.DistributedTest._DistTestBase), {})
        wanted = names or sorted(name for name in dir(case) if name.startswith("test_") and name not in left_out)
        return {name: _run_one(suite, case, name, backend, folder / name) for name in wanted}


def load(backend: str, folder: Path) -> Any:
    """The module with another backend's name for Gloo's: its tests look at the name to see what to skip."""
    if find_spec("expecttest") is None:  # torch's test cases derive from it; none here uses what it adds
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    os.environ |= {
        "BACKEND": backend,
        "WORLD_SIZE": os.environ["WEFT_SIZE"],
        "INIT_METHOD": f"file://{folder}/store-again",  # for the test that makes a group of its own
    }
    spec = find_spec(MODULE)
    assert spec is not None and spec.origin is not None
    module: Any = types.ModuleType(MODULE)
    sys.modules[MODULE] = module
    module.monitored_barrier = _monitored_barrier
    exec(compile(_rename(Path(spec.origin).read_text(), backend), spec.origin, "exec"), module.__dict__)
    os.environ["BACKEND"] = "mpi"  # by which torch's CI is told that tests of parts of the world need no eight ranks
    return module


def _rename(source: str, backend: str) -> str:
    source = source.replace("time.sleep(0.1)", "time.sleep(0.001)")  # between two looks at a barrier of files
    if backend == "gloo":
        return source
    from torch.testing._internal.common_distributed import DistTestCases

    for feature in ("cuda", "ddp", "gpu", "subgroup"):
        DistTestCases.backend_feature[feature].add(backend)
    source = re.sub(r'(?<!"\) == )"gloo"', f'"{backend}"', source)  # what DDP logs of Gloo's own settings stays
    source = source.replace("Backend.GLOO", f"Backend.{backend.upper()}")
    source = source.replace(
        'BACKEND != "mpi"', f'BACKEND not in ("mpi", "{backend}")'
    )  # Gloo has no all-to-all of lists
    return source.replace("dist.monitored_barrier(", "monitored_barrier(")


def _monitored_barrier(*arguments: Any, **named: Any) -> None:
    """torch's own, which looks at nothing but the name to see whether a backend has it."""
    with mock.patch.object(dist.Backend, "GLOO", dist.get_backend()):
        dist.monitored_barrier(*arguments, **named)


def _run_one(suite: Any, case: Any, name: str, backend: str, folder: Path) -> str:
    test = case(name)
    if getattr(getattr(test, name), "__unittest_skip__", False):
        return f"skipped: {getattr(test, name).__unittest_skip_why__}"
    for part in ("barrier", "test_dir"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    os.environ["TEMP_DIR"] = str(folder)
    suite.Barrier.barrier_id = 0
    test.rank, test.file_name = int(os.environ["WEFT_RANK"]), str(folder / "store")
    try:
        _perform(suite, test, name, backend)
        return "passed"
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except SystemExit as skip:
        from torch.testing._internal.common_distributed import TEST_SKIPS

        return f"skipped: {next(known.message for known in TEST_SKIPS.values() if known.exit_code == skip.code)}"
    except BaseException:
        return traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _perform(suite: Any, test: Any, name: str, backend: str) -> None:
    seconds = suite.CUSTOM_PG_TIMEOUT.get(name, suite.default_pg_timeout)
    dist.init_process_group(
        backend,
        init_method=test.init_method,
        world_size=int(os.environ["WEFT_SIZE"]),
        rank=test.rank,
        timeout=timedelta(seconds=seconds),
    )
    test._barrier(timeout=BARRIER_SECONDS)
    torch.manual_seed(1234)
    getattr(test, name)()
    test._barrier(timeout=BARRIER_SECONDS)
