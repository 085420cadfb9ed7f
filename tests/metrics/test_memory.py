"""Peak memory, to the byte for tensors, and in the right order of size for the process."""

import mmap
from pathlib import Path

import pytest
import torch
from torch import nn

from weft.metrics.memory import use_process_memory_peak, use_tensor_memory_peak

MEGABYTE = 2**20


def touch_fresh_pages(num_bytes: int) -> None:
    """Ask the system itself for memory and give it back: malloc may have kept what an earlier test has freed."""
    with mmap.mmap(-1, num_bytes) as pages:
        for offset in range(0, num_bytes, mmap.PAGESIZE):
            pages[offset] = 1


def test_tensors_alive_at_once_are_counted_together() -> None:
    with use_tensor_memory_peak() as peak:
        a = torch.ones(1000)  # 4000
        b = torch.ones(500)  # 6000: the peak
        del a
        c = torch.ones(900)  # 5600
        del b, c
    assert peak.num_bytes == 6000


def test_the_peak_is_valid_for_one_block_only() -> None:
    with use_tensor_memory_peak() as first:
        torch.ones(1000)
    with use_tensor_memory_peak() as second:
        torch.ones(10)
    assert (first.num_bytes, second.num_bytes) == (4000, 40)


def test_views_are_not_counted_twice() -> None:
    with use_tensor_memory_peak() as peak:
        a = torch.ones(10, 100)
        views = [a[1:], a.T, a.reshape(-1), a.expand(3, 10, 100), a.detach()]
    assert peak.num_bytes == 4000
    del views


def test_a_view_keeps_all_of_its_storage_alive() -> None:
    with use_tensor_memory_peak() as peak:
        a = torch.ones(1000)
        view = a[:1]
        del a
        b = torch.ones(1000)
    assert peak.num_bytes == 8000
    del view, b


def test_in_place_operators_take_nothing() -> None:
    with use_tensor_memory_peak() as peak:
        a = torch.zeros(1000)
        a.add_(1).mul_(2).clamp_(max=1)
        torch.add(a, 1, out=a)
    assert peak.num_bytes == 4000


def test_a_storage_that_grows_is_counted_at_its_new_size() -> None:
    with use_tensor_memory_peak() as peak:
        a = torch.zeros(10)
        a.resize_(1000)
        b = torch.zeros(10)
    assert peak.num_bytes == 4040
    del b


def test_what_was_there_before_counts_from_the_start_of_the_block() -> None:
    before = torch.ones(1000)
    with use_tensor_memory_peak() as peak:
        torch.ones(500)  # gone when `before` is first seen, but both were there at once
        before.neg_()
    assert peak.num_bytes == 6000


def test_tensors_made_from_data_are_new() -> None:
    with use_tensor_memory_peak() as peak:
        a = torch.tensor([1.0] * 1000)
        del a
        b = torch.tensor([1.0] * 1000)
    assert peak.num_bytes == 4000
    del b


def test_backward_counts_what_autograd_keeps_alive() -> None:
    x = torch.ones(1000, requires_grad=True)
    with use_tensor_memory_peak() as peak:
        # x 4000, exp 4000 (kept by autograd though no name holds it), sum 4; in backward the 1 of the loss (4) is
        # expanded without a copy and times exp gives the gradient, 4000.
        x.exp().sum().backward()
    assert peak.num_bytes == 4000 + 4000 + 4 + 4 + 4000


def test_autograd_lets_go_of_what_backward_has_used() -> None:
    x = torch.ones(1000, requires_grad=True)
    with use_tensor_memory_peak() as peak:
        x.exp().sum().backward()
        x.grad = None
        torch.ones(2000)
    assert peak.num_bytes == 12_008  # and not the next tensor on top of what backward has freed


def test_two_ways_to_a_step_differ_by_the_activations_they_keep() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    batch = torch.ones(32, 64)
    with use_tensor_memory_peak() as training:
        model(batch).sum().backward()
    with use_tensor_memory_peak() as inference, torch.no_grad():
        model(batch).sum()
    parameters = sum(p.numel() for p in model.parameters()) * 4
    activation = 32 * 64 * 4
    assert inference.num_bytes == parameters + 3 * activation  # the batch, and the two ends of one layer
    assert training.num_bytes >= parameters + 5 * activation


def test_sparse_gradients_are_counted() -> None:
    table = nn.Embedding(1000, 4, sparse=True)
    indices = torch.tensor([1, 2])
    with use_tensor_memory_peak() as peak:
        table(indices).sum().backward()
    assert table.weight.grad is not None and table.weight.grad.is_sparse
    assert 16_000 + 16 + 32 < peak.num_bytes < 16_000 + 500


def test_other_devices_are_not_counted() -> None:
    with use_tensor_memory_peak() as peak:
        torch.ones(1000, device="meta").add(1)
    assert peak.num_bytes == 0


def test_a_block_that_fails_still_has_a_peak() -> None:
    with pytest.raises(RuntimeError), use_tensor_memory_peak() as peak:
        torch.ones(10) @ torch.ones(11)
    assert peak.num_bytes == 84


def test_cuda_is_left_to_its_own_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: calls.append("synchronize"))
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 123)
    with use_tensor_memory_peak("cuda:0") as peak:
        calls.append("block")
    assert (calls, peak.num_bytes) == (["synchronize", "reset", "block"], 123)


def test_an_allocator_that_does_not_count_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_device: torch.device) -> None:
        raise RuntimeError("not a DeviceAllocator")

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", refuse)
    with use_tensor_memory_peak("meta") as peak:
        total = torch.ones(1000, device="meta") + 1
    assert peak.num_bytes == 2 * total.nbytes and "operators" in peak.source


def test_the_process_peak_sees_a_large_allocation() -> None:
    with use_process_memory_peak() as without:
        pass
    with use_process_memory_peak() as peak:
        touch_fresh_pages(64 * MEGABYTE)
    assert peak.num_bytes > without.num_bytes + 60 * MEGABYTE


def test_an_inner_block_hides_nothing_from_the_outer_one() -> None:
    # The system keeps one mark for the process: the reset of the inner block would wipe out the peak of the outer one.
    with use_process_memory_peak() as outer:
        touch_fresh_pages(64 * MEGABYTE)
        with use_process_memory_peak() as inner:
            pass
    assert outer.num_bytes > inner.num_bytes + 60 * MEGABYTE


def test_an_inner_peak_is_also_one_of_the_outer_block() -> None:
    with use_process_memory_peak() as outer:
        with use_process_memory_peak() as inner:
            touch_fresh_pages(64 * MEGABYTE)
        with use_process_memory_peak():
            pass
    assert outer.num_bytes >= inner.num_bytes


def test_a_system_that_allows_no_reset_is_named(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name: x\nVmHWM:\t    2048 kB\nVmRSS: 1 kB\n")
    (tmp_path / "clear_refs").mkdir()  # cannot be written to
    with use_process_memory_peak(proc=tmp_path) as peak:
        pass
    assert peak.num_bytes == 2 * MEGABYTE
    assert peak.source == "peak since the process began"


def test_a_system_without_proc_has_a_peak_all_the_same(tmp_path: Path) -> None:
    with use_process_memory_peak(proc=tmp_path / "none") as peak:
        pass
    assert peak.num_bytes > MEGABYTE
    assert peak.source == "peak since the process began"
