"""The roof over an operator: the shape of it, and that this machine's can be measured."""

import pytest
import torch

from tests.operators.rooflines import ROUND
from weft.errors import UsageError
from weft.operators import roofline as module
from weft.operators.bench import place
from weft.operators.cost import Cost
from weft.operators.cpu_caches import read_caches
from weft.operators.roofline import measure_roofline
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
