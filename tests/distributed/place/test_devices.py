"""The group of a device: which transport is chosen, by all ranks together."""

import logging
import os
from typing import Any

import pytest
import torch
import torch.distributed as distributed

from weft.distributed.group import AbstractGroup, SoloGroup
from weft.distributed.place import Launch, devices
from weft.distributed.place.devices import has_own_transport, open_for_device, prepare_device
from weft.distributed.virtual import run_virtual
from weft.specs import CPU, as_plan


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every GPU could be reached by NCCL."""
    monkeypatch.setattr(devices, "has_own_transport", lambda device: device.type == "cuda")
    monkeypatch.setattr(devices, "open_torch_group", lambda launch, **_: SoloGroup())
    monkeypatch.setattr(devices, "_number_of", lambda device: device.index)


def kinds_of(on: list[str], plan: str = "data=2") -> list[str]:
    """The kind of group that each rank gets, on these devices."""

    def program(group: AbstractGroup) -> str:
        launch = Launch("weft", group.rank, group.size, "", group.size, group.rank)
        return type(open_for_device(launch, group, as_plan(plan), torch.device(on[group.rank]))).__name__

    return list(run_virtual(program, len(on)).results)


def test_a_gpu_each_is_what_nccl_takes(nccl: None) -> None:
    assert kinds_of(["cuda:0", "cuda:1"]) == ["TwoSidedGroup"] * 2
    assert kinds_of(["cuda:0", "cuda:0"]) == ["StagedGroup"] * 2
    assert kinds_of(["cuda:0", "cpu"]) == ["StagedGroup", "VirtualGroup"]
    assert kinds_of(["cuda:0", "cuda:1"], "data=2 topology=ring") == ["StagedGroup"] * 2


def test_the_cpu_keeps_its_group() -> None:
    assert kinds_of(["cpu", "cpu"]) == ["VirtualGroup"] * 2
    assert kinds_of(["cpu", "cpu"], "data=2 topology=ring") == ["MessageGroup"] * 2
    alone = SoloGroup()
    assert open_for_device(Launch("nobody"), alone, as_plan(""), torch.device("cuda:0")) is alone


def test_staging_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    devices._say_staged.cache_clear()
    with caplog.at_level(logging.WARNING, "weft"):
        assert kinds_of(["xpu:0", "xpu:1"]) == kinds_of(["xpu:0", "xpu:1"]) == ["StagedGroup"] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "tensors of xpu:0 travel between ranks by way of host memory: no transport for them is at hand"
    ]


@pytest.mark.parametrize(("backend", "is_there"), [("nccl", True), ("xccl", False)])
def test_a_transport_is_one_that_weft_can_open(monkeypatch: pytest.MonkeyPatch, backend: str, is_there: bool) -> None:
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(distributed, "get_default_backend_for_device", lambda device: backend)
    assert has_own_transport(torch.device("cuda:0")) is is_there
    assert not has_own_transport(CPU)


def test_a_process_is_set_up_for_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "mine")
    prepare_device(torch.device("cuda:1"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == "mine"
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    prepare_device(CPU)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    prepare_device(torch.device("cuda:1"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    assert chosen == [torch.device("cuda:1")] * 2
