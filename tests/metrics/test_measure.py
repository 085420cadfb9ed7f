"""Measurements in a loop of the user's own, on a clock that the loop moves itself."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from weft.errors import UsageError
from weft.metrics import measure as module
from weft.metrics.measure import Measurements, count_samples
from weft.metrics.metric import find_metric
from weft.records.record_file import read_record
from weft.specs import Batch


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def mine(clock: FakeClock) -> Measurements:
    return Measurements("mine", clock=clock)


def slow_loader(clock: FakeClock, sizes: list[int], wait: float) -> Iterator[torch.Tensor]:
    """A loader of unknown length."""
    for size in sizes:
        clock.now += wait
        yield torch.zeros(size, 3)


def test_blocks_are_timed_by_name(mine: Measurements, clock: FakeClock) -> None:
    for seconds in (1.0, 3.0, 2.0):
        with mine.measure("forward"):
            clock.now += seconds
    with mine.measure("backward"):
        clock.now += 4.0
    assert mine.series == {"forward/wall_clock": (1.0, 3.0, 2.0), "backward/wall_clock": (4.0,)}
    forward, _ = mine.summaries()
    assert (forward.steady.count, forward.steady.median, forward.overall, forward.unit) == (3, 2.0, 6.0, "s")


def test_measure_decorates_a_function(mine: Measurements, clock: FakeClock) -> None:
    @mine.measure("step")
    def step(seconds: float) -> float:
        clock.now += seconds
        return seconds

    assert [step(1.0), step(2.0)] == [1.0, 2.0]
    assert mine.series == {"step/wall_clock": (1.0, 2.0)}


def test_block_that_raises_is_not_recorded(mine: Measurements) -> None:
    with pytest.raises(ZeroDivisionError), mine.measure("forward"):
        raise ZeroDivisionError
    assert mine.series == {}


def test_loop_tells_waiting_from_working(mine: Measurements, clock: FakeClock) -> None:
    for _ in mine.measured(slow_loader(clock, [4, 4, 2], wait=0.5), "train"):
        clock.now += 1.5
    assert mine.series == {
        "train/data_wait": (0.5, 0.5, 0.5),
        "train/step_time": (1.5, 1.5, 1.5),
        "train/throughput": (2.0, 2.0, 1.0),
    }


def test_overall_throughput_weighs_by_time_and_samples(mine: Measurements, clock: FakeClock) -> None:
    # The mean of the rates would be 5.5 samples/s: rates are summed up by what was done over what it took.
    for batch in mine.measured([torch.zeros(10), torch.zeros(10)], "train"):
        clock.now += 1.0 if clock.now == 0 else 10.0
        assert len(batch) == 10
    throughput = mine.summaries()[-1]
    assert mine.series["train/throughput"] == (10.0, 1.0)
    assert throughput.overall == pytest.approx(20 / 11)


def test_loop_can_be_run_again_and_has_the_length_of_its_loader(mine: Measurements, clock: FakeClock) -> None:
    loader = mine.measured(DataLoader(TensorDataset(torch.zeros(10, 2), torch.zeros(10)), batch_size=4), "train")
    for _epoch in range(2):
        for inputs, targets in loader:
            clock.now += 1.0
            assert len(inputs) == len(targets)
    assert len(loader) == 3
    assert mine.series["train/throughput"] == (4.0, 4.0, 2.0) * 2


def test_loop_over_batches_of_unknown_length(mine: Measurements, clock: FakeClock) -> None:
    loop = mine.measured(slow_loader(clock, [1, 1], wait=1.0))
    with pytest.raises(TypeError, match="no length"):
        len(loop)
    assert len(list(loop)) == 2
    assert mine.series["loop/data_wait"] == (1.0, 1.0)


def test_step_that_raises_or_breaks_is_not_recorded(mine: Measurements, clock: FakeClock) -> None:
    with pytest.raises(ZeroDivisionError):
        for index, _ in enumerate(mine.measured(itertools.repeat(torch.zeros(2)), "train")):
            clock.now += 1.0
            if index == 2:
                raise ZeroDivisionError
    assert mine.series["train/step_time"] == (1.0, 1.0)


def test_error_of_the_loader_is_the_callers(mine: Measurements, clock: FakeClock) -> None:
    def loader() -> Iterator[torch.Tensor]:
        yield torch.zeros(2)
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        for _ in mine.measured(loader(), "train"):
            clock.now += 1.0
    assert mine.series["train/step_time"] == (1.0,)


def test_number_of_samples_can_be_given(mine: Measurements, clock: FakeClock) -> None:
    for name, num_samples in (("fixed", 7), ("counted", len)):
        for _ in mine.measured(["ab", "c"], name, num_samples=num_samples):
            clock.now += 1.0
    assert mine.series["fixed/throughput"] == (7.0, 7.0)
    assert mine.series["counted/throughput"] == (2.0, 1.0)


def test_batches_without_samples_have_times_and_no_throughput(mine: Measurements, clock: FakeClock) -> None:
    for _ in mine.measured(["ab", "c"], "words"):
        clock.now += 1.0
    assert set(mine.series) == {"words/data_wait", "words/step_time"}


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(5, 2),
        np.zeros((5, 2)),
        (torch.zeros(5, 2), torch.zeros(6)),
        ["text", {"length": torch.tensor(3), "ids": torch.zeros(5)}],
        Batch((torch.zeros(5, 1),), (torch.zeros(5),)),
    ],
)
def test_samples_are_counted_along_the_first_dimension_of_the_first_tensor(batch: object) -> None:
    assert count_samples(batch) == 5


def test_batch_without_a_dimension_has_no_samples() -> None:
    assert count_samples([torch.tensor(3.0), "text", None, 4]) is None


def test_device_is_synchronised_at_both_ends(clock: FakeClock) -> None:
    queued: list[float] = []

    def synchronise() -> None:
        clock.now += sum(queued)
        queued.clear()

    mine = Measurements(clock=clock, synchronise=synchronise)
    queued.append(100.0)  # queued before the block: not the block's
    with mine.measure("forward"):
        queued.append(2.0)
    for _ in mine.measured([torch.zeros(1)] * 2, "train"):
        queued.append(3.0)
    assert mine.series["forward/wall_clock"] == (2.0,)
    assert mine.series["train/step_time"] == (3.0, 3.0)


def test_instances_share_nothing(mine: Measurements, clock: FakeClock) -> None:
    # Deep500 built metrics once as default arguments: a 0 ms operator reported the time of the one tested before it.
    other = Measurements(clock=clock)
    with mine.measure("forward"):
        clock.now += 1.0
    assert other.series == {}
    kept = mine.series
    mine.clear()
    assert mine.series == {}
    assert kept == {"forward/wall_clock": (1.0,)}


def test_loop_made_before_clear_still_records(mine: Measurements, clock: FakeClock) -> None:
    loop = mine.measured([torch.zeros(1)], "train")
    list(loop)
    mine.clear()
    list(loop)
    assert len(mine.series["train/step_time"]) == 1


def test_warmup_is_left_out_of_the_median_only(mine: Measurements, clock: FakeClock) -> None:
    for seconds in [30.0, 9.0, *[1.0] * 18]:
        with mine.measure("step"):
            clock.now += seconds
    (step,) = mine.summaries()
    assert (step.num_warmup, step.steady.count, step.steady.interval.high) == (2, 18, 1.0)
    assert step.overall == 57.0
    assert len(mine.series["step/wall_clock"]) == 20


def test_table_is_aligned_plain_text(mine: Measurements, clock: FakeClock) -> None:
    for _ in mine.measured(slow_loader(clock, [4] * 6, wait=0.5), "train"):
        clock.now += 1.5
    lines = mine.table().splitlines()
    assert lines[0].split() == ["series", "values", "warm-up", "median", "95%", "interval", "overall", "unit"]
    assert lines[1].split() == ["train/data_wait", "6", "0", "0.5", "0.5", "to", "0.5", "3", "s"]
    assert lines[3].split() == ["train/throughput", "6", "0", "2", "2", "to", "2", "2", "samples/s"]
    assert lines[0].index("unit") == lines[1].rindex("s") == lines[3].index("samples/s")


def test_saved_record_holds_every_raw_value_and_one_number_a_series(
    mine: Measurements, clock: FakeClock, tmp_path: Path
) -> None:
    for _ in mine.measured(slow_loader(clock, [4, 4, 1], wait=0.5), "train"):
        clock.now += 1.5
    mine.save(tmp_path / "run")
    record = read_record(tmp_path / "run")
    (repetition,) = record.repetitions
    assert (record.name, record.recipe, repetition.status) == ("mine", {}, "done")
    assert repetition.series == mine.series
    assert repetition.values == {"train/data_wait": 0.5, "train/step_time": 1.5, "train/throughput": 1.5}
    assert all(find_metric(name) for name in repetition.values)
    assert repetition.seed == torch.initial_seed()


def test_saving_nothing_is_refused(mine: Measurements, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing was measured"):
        mine.save(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_module_level_functions_write_to_the_shared_instance() -> None:
    try:
        with module.measure("block"):
            pass
        assert len(list(module.measured([torch.zeros(2)], "train"))) == 1
        assert {"block/wall_clock", "train/step_time"} <= set(module.measurements.series)
        assert all(math.isfinite(value) for values in module.measurements.series.values() for value in values)
    finally:
        module.measurements.clear()
