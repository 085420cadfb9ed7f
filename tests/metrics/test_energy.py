"""Energy from a RAPL tree made by hand: what is counted once, what wraps, and the reason where there is none."""

import math
import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.metrics.energy import joules_between, start_energy_meter

RANGE = 262_143_328_850  # microjoules, of a usual Intel processor


def add_domain(root: Path, folder: str, name: str, microjoules: int = 0) -> Path:
    (root / folder).mkdir(parents=True)
    (root / folder / "name").write_text(f"{name}\n")
    (root / folder / "max_energy_range_uj").write_text(f"{RANGE}\n")
    counter = root / folder / "energy_uj"
    counter.write_text(f"{microjoules}\n")
    return counter


def test_joules_since_the_start(tmp_path: Path) -> None:
    counter = add_domain(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    meter, reason = start_energy_meter(tmp_path)
    assert meter is not None and reason == ""
    assert (meter.joules, meter.update()) == (0.0, 0.0)
    counter.write_text("8500000\n")
    assert meter.update() == meter.joules == 3.5
    counter.write_text("9000000\n")
    assert meter.update() == 4.0


def test_every_package_counts_once(tmp_path: Path) -> None:
    domains = {
        "intel-rapl:0": "package-0",
        "intel-rapl:1": "package-1",
        "intel-rapl:0:0": "core",  # inside package-0
        "intel-rapl:2": "psys",  # contains both packages
        "intel-rapl-mmio:0": "package-0",  # the same one by another way
    }
    counters = [add_domain(tmp_path, folder, name) for folder, name in domains.items()]
    (tmp_path / "intel-rapl").mkdir()  # the control folder, which has no counter
    meter, _ = start_energy_meter(tmp_path)
    assert meter is not None
    for counter in counters:
        counter.write_text("1000000\n")
    assert meter.update() == 2.0


def test_a_counter_that_starts_again_is_carried_on(tmp_path: Path) -> None:
    counter = add_domain(tmp_path, "intel-rapl:0", "package-0", RANGE - 1_000_000)
    meter, _ = start_energy_meter(tmp_path)
    assert meter is not None
    counter.write_text("500000\n")
    assert meter.update() == 1.5
    counter.write_text("100000\n")  # and once more
    assert meter.update() == pytest.approx(1.5 + (RANGE - 400_000) / 1e6)


@given(st.integers(0, RANGE), st.lists(st.integers(0, RANGE // 1000), max_size=5))
def test_any_run_of_readings_adds_up(start: int, steps: list[int]) -> None:
    readings = [start]
    for step in steps:
        readings.append((readings[-1] + step) % RANGE)
    total = sum(joules_between(a, b, RANGE) for a, b in pairwise(readings))
    assert total == pytest.approx(sum(steps) / 1e6)


def test_the_reason_where_there_is_no_rapl(tmp_path: Path) -> None:
    meter, reason = start_energy_meter(tmp_path / "none")
    assert meter is None and "no RAPL package found" in reason
    add_domain(tmp_path, "intel-rapl:0", "psys")
    assert start_energy_meter(tmp_path)[0] is None


def test_the_reason_where_only_root_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = add_domain(tmp_path, "intel-rapl:0", "package-0")
    real = Path.read_text

    def guarded(path: Path, *args: str, **kwargs: str) -> str:  # tests may run as root, who may read anything
        if path == counter:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", guarded)
    meter, reason = start_energy_meter(tmp_path)
    assert meter is None
    assert reason == f"only root may read {counter}; sudo chmod a+r {counter}"


@pytest.mark.parametrize("content", ["", "many\n", None])
def test_the_reason_where_a_counter_makes_no_sense(tmp_path: Path, content: str | None) -> None:
    counter = add_domain(tmp_path, "intel-rapl:0", "package-0")
    os.remove(counter) if content is None else counter.write_text(content)
    meter, reason = start_energy_meter(tmp_path)
    assert meter is None and "could not be read" in reason


def test_a_counter_that_goes_away_makes_the_energy_unknown_and_training_goes_on(tmp_path: Path) -> None:
    counter = add_domain(tmp_path, "intel-rapl:0", "package-0")
    meter, _ = start_energy_meter(tmp_path)
    assert meter is not None
    counter.unlink()
    assert math.isnan(meter.update())
    counter.write_text("1000000\n")
    assert math.isnan(meter.update())


def test_this_machine_gives_a_meter_or_a_reason() -> None:
    meter, reason = start_energy_meter()
    assert (meter is None) == bool(reason)
