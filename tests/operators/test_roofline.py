"""The roof over an operator: the shape of it, and that this machine's can be measured."""

from pathlib import Path

import pytest
import torch

from tests.operators.rooflines import ROUND
from weft.errors import UsageError
from weft.operators import roofline as module
from weft.operators.bench import place
from weft.operators.cost import Cost
from weft.operators.roofline import Cache, measure_roofline, read_caches
from weft.operators.roofline_drawing import HEIGHT, WIDTH, draw_roofline


def test_the_nearest_memory_that_holds_all() -> None:
    assert [ROUND.memory_of(size).name for size in (0, 1000, 1001, 100_001, 10**12)] == [
        "L1",
        "L1",
        "L2",
        "DRAM",
        "DRAM",
    ]


def test_the_roof_rises_to_the_peak_and_stays() -> None:
    dram = ROUND.ceilings[-1]
    assert ROUND.attainable(0.5, dram) == 5e9
    assert ROUND.attainable(100.0, dram) == 60e9
    assert ROUND.attainable(100.0, dram, torch.float64) == 30e9
    assert ROUND.attainable(100.0, dram, torch.bfloat16) == 60e9


def test_roofline_of_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.005)
    monkeypatch.setattr(module, "DRAM_BYTES", 2**22)
    monkeypatch.setattr(module, "read_caches", lambda: read_caches()[:2])
    roofline = measure_roofline.__wrapped__(1)
    assert [ceiling.name for ceiling in roofline.ceilings][-1] == "DRAM"
    assert all(ceiling.bytes_per_second > 1e6 for ceiling in roofline.ceilings)
    assert set(roofline.peaks) == {"float32", "float64"}
    assert all(peak.measured > 1e6 for peak in roofline.peaks.values())
    assert roofline.vector_bytes in (16, 32, 64)


def test_no_threads_are_refused() -> None:
    with pytest.raises(UsageError, match="threads"):
        measure_roofline(0)


def test_the_nominal_peak_is_frequency_times_width_times_instructions() -> None:
    assert module._nominal(2e9, 8, 3) == 2e9 * 8 * 2 * 2 * 3
    assert module._nominal(None, 8, 3) is None


def test_the_picture_has_every_roof_and_every_point() -> None:
    point = place(Cost(10**6, 10**6, 0), 1e-4, ROUND)
    lines = draw_roofline(ROUND, {"A": point, "B": place(Cost(0, 10, 0), 1.0, ROUND)})
    body = "\n".join(line.partition("|")[2] for line in lines)
    assert len(lines) == HEIGHT + 3 and all(len(line) <= WIDTH + 30 for line in lines)
    assert set("=12MA") <= set(body) and "B" not in body  # nothing computed: no place on this picture
    # At 1 FLOP/B the roof of DRAM is at 10 GFLOP/s: the point reached just that.
    assert point.share == pytest.approx(1.0)


def plant(cpu: Path, index: int, **facts: str) -> None:
    folder = cpu / "cache" / f"index{index}"
    folder.mkdir(parents=True)
    for name, text in facts.items():
        (folder / name).write_text(f"{text}\n")


def test_data_caches_nearest_first(tmp_path: Path) -> None:
    plant(tmp_path, 0, level="3", type="Unified", size="32M", shared_cpu_list="0-3,8-11")
    plant(tmp_path, 1, level="1", type="Instruction", size="64K", shared_cpu_list="0")
    plant(tmp_path, 2, level="1", type="Data", size="32K", shared_cpu_list="0")
    plant(tmp_path, 3, level="2", type="Unified", size="512K", shared_cpu_list="0,8")
    assert read_caches(tmp_path) == (Cache(1, 2**15, 1), Cache(2, 2**19, 2), Cache(3, 2**25, 8))


def test_unreadable_caches_are_left_out(tmp_path: Path) -> None:
    plant(tmp_path, 0, level="1", type="Data", size="unknown", shared_cpu_list="0")
    plant(tmp_path, 1, level="2", type="Data", size="1M", shared_cpu_list="?")
    assert read_caches(tmp_path) == (Cache(2, 2**20, 1),)
    assert read_caches(tmp_path / "absent") == ()


def test_threads_share_a_cache_only_as_far_as_processors_do() -> None:
    assert (Cache(1, 100, 1).share_of(2), Cache(1, 100, 1).total_of(2)) == (100, 200)
    assert (Cache(3, 100, 8).share_of(2), Cache(3, 100, 8).total_of(2)) == (50, 100)
