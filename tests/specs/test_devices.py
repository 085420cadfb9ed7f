"""Which device a wish means, on machines that have an accelerator and on those that have none."""

import pytest
import torch

from weft.errors import UsageError
from weft.specs import CPU, find_device, list_devices


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)


def test_without_an_accelerator_there_is_the_cpu() -> None:
    assert find_device("auto") == find_device("cpu", local_rank=3) == CPU
    assert list_devices() == ("cpu",)


@pytest.mark.parametrize("wish", ["cuda", "cuda:0", "mps", "gpu", "", "cpu:0", "auto:0"])
def test_a_device_that_is_not_there_is_refused(wish: str) -> None:
    with pytest.raises(UsageError, match=r"no such device \(device: .*here: cpu\); choose one, or auto"):
        find_device(wish)


@pytest.mark.parametrize(
    ("wish", "local_rank", "device"),
    [
        ("auto", 0, "cuda:0"),
        ("auto", 1, "cuda:1"),
        ("cuda", 3, "cuda:1"),  # ranks go round where there are more of them than devices
        ("cuda:1", 0, "cuda:1"),
        ("cpu", 1, "cpu"),
    ],
)
def test_ranks_take_one_device_each(wish: str, local_rank: int, device: str, two_gpus: None) -> None:
    assert find_device(wish, local_rank) == torch.device(device)
    assert list_devices() == ("cpu", "cuda:0", "cuda:1")


@pytest.mark.parametrize("wish", ["cuda:2", "cuda:", "cuda:x", "cuda:-1", "xpu", "auto:1"])
def test_devices_beyond_the_last_and_of_another_kind_are_refused(wish: str, two_gpus: None) -> None:
    with pytest.raises(UsageError, match="here: cpu, cuda:0, cuda:1"):
        find_device(wish)
