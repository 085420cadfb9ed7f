"""What a record says of the machine: right from known files, and never a crash where they are missing."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from weft.records.machine import describe_machine, describe_source, describe_versions

CPUINFO = """processor\t: 0
model name\t: Fast Processor 9000
flags\t\t: fpu avx2 fma avx512f amx_bf16 zzz

processor\t: 1
model name\t: Slow Processor 1
"""


def test_known_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(CPUINFO)
    (tmp_path / "meminfo").write_text("MemFree: 1 kB\nMemTotal:       2048 kB\n")
    governor = tmp_path / "devices/system/cpu/cpu0/cpufreq/scaling_governor"
    governor.parent.mkdir(parents=True)
    governor.write_text("performance\n")
    machine = describe_machine(proc=tmp_path, sys=tmp_path)
    assert machine["cpu"] == "Fast Processor 9000"
    assert machine["cpu_features"] == ["avx2", "fma", "avx512f", "amx_bf16"]
    assert machine["memory_bytes"] == 2048 * 1024
    assert machine["governor"] == "performance"


def test_arm_processors_name_their_features_otherwise(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("Features\t: fp asimd bf16 sve\n")
    machine = describe_machine(proc=tmp_path, sys=tmp_path)
    assert machine["cpu_features"] == ["asimd", "bf16", "sve"]
    assert machine["cpu"]


def test_missing_and_strange_files_do_no_harm(tmp_path: Path) -> None:
    nothing = describe_machine(proc=tmp_path / "none", sys=tmp_path / "none")
    assert (nothing["memory_bytes"], nothing["governor"], nothing["cpu_features"]) == (0, "", [])
    (tmp_path / "cpuinfo").write_bytes(b"\xff\xfe no colon")
    (tmp_path / "meminfo").write_text("MemTotal: much\n")
    assert describe_machine(proc=tmp_path, sys=tmp_path)["memory_bytes"] == 0


def test_cores_are_those_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert describe_machine()["cores"] == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_threads_are_those_of_torch_now() -> None:
    torch.set_num_threads(2)
    assert describe_machine()["torch_threads"] == 2


def test_a_record_names_no_host_and_no_user() -> None:
    text = json.dumps([describe_machine(), describe_versions()])
    for name in (os.uname().nodename, os.environ.get("USER", ""), os.path.expanduser("~")):
        assert len(name) < 5 or name not in text


def test_versions_are_texts() -> None:
    versions = describe_versions()
    assert list(versions) == ["python", "torch", "numpy", "scipy", "weft"]
    assert versions["torch"] == torch.__version__


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit and a package folder in it."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)  # inside a git hook they name a repository that is not ours to write to
    (tmp_path / "weft").mkdir()
    (tmp_path / "weft" / "file.py").write_text("one")
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    return tmp_path


def test_a_clean_and_a_dirty_checkout(checkout: Path) -> None:
    source = describe_source(checkout / "weft")
    assert len(source["commit"]) == 40 and source["dirty"] is False
    (checkout / "weft" / "file.py").write_text("two")
    assert describe_source(checkout / "weft") == {**source, "dirty": True}


def test_a_new_file_makes_a_checkout_dirty(checkout: Path) -> None:
    (checkout / "weft" / "new.py").write_text("")
    assert describe_source(checkout / "weft")["dirty"] is True


def test_a_package_deep_in_another_project_has_no_source(checkout: Path) -> None:
    installed = checkout / ".venv" / "site-packages" / "weft"
    installed.mkdir(parents=True)
    assert describe_source(installed) == {}


def test_a_repository_named_by_the_environment_is_not_taken(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path_factory.mktemp("other")))
    assert len(describe_source(checkout / "weft")["commit"]) == 40


def test_without_git_there_is_no_source(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert describe_source(checkout / "weft") == {}


def test_a_broken_repository_has_no_source(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    assert describe_source(tmp_path / "weft") == {}
