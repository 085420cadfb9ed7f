"""The examination of a machine: every probe can fail, and none of them can end the examination."""

import os
import shutil
import stat
import sys
from collections import namedtuple
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch

from weft.engines.environment import check_environment, check_extras, is_fit, machine, packages, transports
from weft.engines.environment.probe import Check, Probe, run_probe


def failing(error: Exception) -> Callable[[], str]:
    def look() -> str:
        raise error

    return look


def make_program(folder: Path, name: str, script: str) -> Path:
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


@pytest.mark.parametrize(
    ("look", "status", "detail", "cure"),
    [
        (lambda: "version 1", "ok", "version 1", ""),
        (failing(ModuleNotFoundError("not installed")), "missing", "not installed", "install it"),
        (failing(FileNotFoundError("no such program")), "missing", "no such program", "install it"),
        (failing(ImportError("libfoo.so: cannot open\nmore")), "broken", "libfoo.so: cannot open", "install it"),
        (failing(OSError()), "broken", "OSError", "install it"),
    ],
)
def test_outcome_of_a_probe(look: Callable[[], str], status: str, detail: str, cure: str) -> None:
    check = run_probe(Probe("section", "thing", look, "install it"))
    assert (check.status, check.detail, check.cure) == (status, detail, cure)


def test_one_broken_probe_does_not_hide_the_others() -> None:
    probes = [Probe("s", "bad", failing(RuntimeError("boom"))), Probe("s", "good", lambda: "here")]
    assert [check.status for check in check_environment(probes)] == ["broken", "ok"]


def test_only_what_is_required_decides_about_fitness() -> None:
    def check(status: str, *, required: bool) -> Check:
        return run_probe(Probe("s", "x", {"ok": lambda: "", "bad": failing(OSError())}[status], "", required))

    assert is_fit([check("ok", required=True), check("bad", required=False)])
    assert not is_fit([check("ok", required=True), check("bad", required=True)])


def test_this_machine_is_fit() -> None:
    checks = check_environment()
    assert is_fit(checks), [check for check in checks if check.required and check.status != "ok"]
    assert {check.section for check in checks} == {"machine", "packages", "transports", "extras"}
    found = {check.name: check for check in checks}
    for name in ("python", "processor", "cores", "memory", "C++ compiler", "solo", "torch (gloo)", "shared memory"):
        assert found[name].status == "ok", found[name]


def test_whatever_does_not_work_has_a_reason() -> None:
    assert all(check.detail for check in check_environment())
    assert {check.name for check in check_extras()} >= {"ray", "pyspark", "jax", "onnx", "onnxruntime", "pillow"}


def test_python_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "OLDEST_PYTHON", (4, 0))
    with pytest.raises(RuntimeError, match=r"is older than 4\.0"):
        machine.look_at_python()


@pytest.mark.parametrize(("text", "quota"), [("max 100000\n", None), ("150000 100000\n", 1.5)])
def test_share_of_the_processor_that_a_container_has(tmp_path: Path, text: str, quota: float | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert machine.cpu_quota(tmp_path / "cpu.max") == quota
    assert machine.cpu_quota(tmp_path / "absent") is None


def test_cores_tell_of_a_container_that_limits_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_quota", lambda: 0.5)
    assert "the container may use the time of 0.5" in machine.look_at_cores()


def test_shared_memory_as_small_as_dockers_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(64 * 2**20, 0, 64 * 2**20))
    with pytest.raises(RuntimeError, match="holds only 67 MB"):
        machine.look_at_shared_memory(tmp_path)


def test_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    check = run_probe(Probe("machine", "C++ compiler", machine.look_at_compiler))
    assert (check.status, check.detail) == ("missing", "no C++ compiler was found (looked for: no-such-compiler)")


def test_compiler_that_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(make_program(tmp_path, "cxx", "echo 'no linker' >&2; exit 1")))
    check = run_probe(Probe("machine", "C++ compiler", machine.look_at_compiler))
    assert (check.status, check.detail) == ("broken", f"{tmp_path}/cxx failed: no linker")


def test_compiler_that_says_yes_and_makes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(make_program(tmp_path, "cxx", "exit 0")))
    assert run_probe(Probe("machine", "C++ compiler", machine.look_at_compiler)).status == "broken"


def test_compiler_that_makes_wrong_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SOURCE", 'extern "C" int answer() { return 41; }')
    with pytest.raises(RuntimeError, match="wrong results"):
        machine.look_at_compiler()


def test_torch_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_pinned_version", lambda _: "1.0.0")
    with pytest.raises(RuntimeError, match=r"version 2\..*, but Weft is tested with 1\.0\.0"):
        packages.look_at_torch()


def test_pin_is_read_from_the_metadata_of_weft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda _: ["numpy", "torch==2.13.0", "x==1; extra == 'y'"])
    assert packages._pinned_version("torch") == "2.13.0"
    assert packages._pinned_version("numpy") is None


def test_package_that_is_not_there() -> None:
    with pytest.raises(ModuleNotFoundError, match="not installed"):
        packages.look_at_package("no-such-thing", "no_such_thing")


@pytest.mark.parametrize(
    ("version", "status", "detail"),
    [
        ('openjdk version "17.0.15" 2025-04-15', "ok", "4.0, Java 17"),
        ('java version "1.8.0_401"', "broken", "4.0, but Java 8 is older than 17"),
        ("what?", "broken", "java does not tell its version"),
    ],
)
def test_spark_needs_java(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, status: str, detail: str
) -> None:
    make_program(tmp_path, "java", f"echo '{version}' >&2")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(packages, "look_at_package", lambda *_: "4.0")
    check = run_probe(Probe("extras", "pyspark", packages.look_at_spark))
    assert (check.status, check.detail) == (status, detail)


def test_spark_without_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(packages, "look_at_package", lambda *_: "4.0")
    with pytest.raises(RuntimeError, match="no java on the path"):
        packages.look_at_spark()


def test_torch_without_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    with pytest.raises(ModuleNotFoundError, match="lacks Gloo"):
        transports.look_at_gloo()


def test_gloo_leaves_no_group_behind() -> None:
    transports.look_at_gloo()
    assert not torch.distributed.is_initialized()


def test_shared_memory_is_removed(tmp_path: Path) -> None:
    assert transports.look_at_shared_memory(tmp_path).endswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_shared_memory_that_is_not_mounted(tmp_path: Path) -> None:
    check = run_probe(Probe("transports", "shared memory", lambda: transports.look_at_shared_memory(tmp_path / "shm")))
    assert check.status == "missing"


def test_shared_memory_that_is_full_is_an_error_and_no_bus_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    check = run_probe(Probe("transports", "shared memory", lambda: transports.look_at_shared_memory(tmp_path)))
    assert (check.status, check.detail) == ("broken", "[Errno 28] No space left on device")


def test_mpi_without_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "look_at_package", lambda *_: "4.1")
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match=r"mpi4py 4\.1, but no mpirun"):
        transports.look_at_mpi()


def test_mpi_of_the_same_environment_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "look_at_package", lambda *_: "4.1")
    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"{path}/{name}" if path else None)
    assert transports.look_at_mpi().endswith("bin/mpirun")


def test_machine_without_a_gpu_lacks_cuda_and_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_describe", lambda: {"cuda_devices": []})
    for look in (machine.look_at_cuda, transports.look_at_nccl):
        with pytest.raises(FileNotFoundError, match="no CUDA device"):
            look()


def test_torch_that_cannot_be_imported_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    checks = {check.name: check for check in check_environment()}
    assert not is_fit(list(checks.values()))
    assert checks["torch"].cure == "pip install -c constraints.txt torch"
    assert (checks["torch (gloo)"].status, checks["numpy"].status) == ("missing", "ok")
