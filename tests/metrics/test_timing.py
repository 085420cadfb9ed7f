"""Timings, on a clock that the timed functions move themselves."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, cycle, repeat

import pytest
import torch

from weft.errors import UsageError
from weft.metrics.timing import Timing, TimingRule, synchronise_device, time_callable, time_interleaved


class FakeClock:
    """Stands still unless a call takes time."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def taking(self, seconds: Iterable[float]) -> Callable[[], None]:
        """A function whose calls take these seconds, one after the other."""
        durations: Iterator[float] = iter(seconds)

        def call() -> None:
            self.now += next(durations)

        return call


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_steady_call_stops_as_soon_as_the_interval_is_narrow(clock: FakeClock) -> None:
    timing = time_callable(clock.taking(repeat(0.5)), name="step", rule=TimingRule(max_seconds=1000), clock=clock)
    assert timing == Timing("step", (0.5,) * 10, 0, "interval reached")
    assert timing.summary.median == 0.5


def test_warmup_is_kept_but_not_counted(clock: FakeClock) -> None:
    timing = time_callable(clock.taking(chain([8.0, 4.0], repeat(1.0))), clock=clock, rule=TimingRule(max_seconds=99))
    assert timing.seconds[:3] == (8.0, 4.0, 1.0)
    assert timing.num_warmup == 2
    assert timing.steady == (1.0,) * 8
    assert timing.summary.interval.high == 1.0


def test_noisy_call_is_repeated_until_the_whole_interval_is_within_the_rule(clock: FakeClock) -> None:
    noise = cycle([0.9, 1.1, 1.0, 0.95, 1.05, 1.02, 0.98])
    timing = time_callable(clock.taking(noise), rule=TimingRule(max_seconds=1e6), clock=clock)
    assert timing.stop_reason == "interval reached"
    assert len(timing.seconds) > 10
    assert timing.summary.interval.width <= 0.05 * timing.summary.median
    wider = time_callable(clock.taking(noise), rule=TimingRule(relative_width=0.3, max_seconds=1e6), clock=clock)
    assert len(wider.seconds) < len(timing.seconds)


def test_call_that_never_settles_ends_with_its_budget(clock: FakeClock) -> None:
    def erratic() -> Callable[[], None]:
        return clock.taking(cycle([1.0, 3.0, 2.0]))

    by_count = time_callable(erratic(), rule=TimingRule(max_count=7, max_seconds=99), clock=clock)
    assert (len(by_count.seconds), by_count.stop_reason) == (7, "count budget spent")
    by_time = time_callable(erratic(), rule=TimingRule(max_seconds=12.0), clock=clock)
    assert (by_time.seconds, by_time.stop_reason) == ((1.0, 3.0, 2.0, 1.0, 3.0, 2.0), "time budget spent")


def test_one_call_longer_than_the_budget_is_still_timed(clock: FakeClock) -> None:
    timing = time_callable(clock.taking([60.0]), rule=TimingRule(max_seconds=1.0), clock=clock)
    assert timing.seconds == (60.0,)
    assert not timing.summary.interval.is_known


@pytest.mark.parametrize("bad", [{"relative_width": 0.0}, {"max_seconds": -1.0}, {"max_count": 0}])
def test_rule_that_can_never_be_met_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="positive"):
        TimingRule(**bad)  # type: ignore[arg-type]


def test_device_is_synchronised_before_both_readings_of_the_clock() -> None:
    # Deep500 read the clock around an asynchronous launch, so GPU time was not measured at all.
    log: list[str] = []

    def clock() -> float:
        log.append("clock")
        return float(len(log))

    def synchronise() -> None:
        log.append("synchronise")

    rule = TimingRule(max_count=1)
    time_callable(lambda: log.append("call"), rule=rule, clock=clock, synchronise=synchronise)
    assert log[1:6] == ["synchronise", "clock", "call", "synchronise", "clock"]


def test_work_still_queued_on_the_device_is_charged_to_the_call_that_queued_it(clock: FakeClock) -> None:
    queued: list[float] = []

    def synchronise() -> None:
        clock.now += sum(queued)
        queued.clear()

    rule = TimingRule(max_count=3)
    timing = time_callable(lambda: queued.append(2.0), rule=rule, clock=clock, synchronise=synchronise)
    assert timing.seconds == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("is_in_use", [True, False])
def test_an_accelerator_is_synchronised_only_where_it_is_in_use(
    monkeypatch: pytest.MonkeyPatch, is_in_use: bool
) -> None:
    calls: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_in_use)
    monkeypatch.setattr(torch.accelerator, "synchronize", calls.append)
    synchronise_device()
    assert calls == [torch.device("cuda")] * is_in_use
    synchronise_device(torch.device("cuda:1"))
    assert calls[is_in_use:] == [torch.device("cuda:1")]


def test_the_cpu_has_nothing_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: pytest.fail("the CPU was synchronised"))
    synchronise_device()
    synchronise_device(torch.device("cpu"))


def test_an_error_of_the_timed_call_is_the_callers(clock: FakeClock) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        time_callable(broken, clock=clock)


def test_abba_order_runs_forwards_and_backwards_by_turns(clock: FakeClock) -> None:
    log: list[str] = []
    functions = {name: (lambda name=name: log.append(name)) for name in "ABC"}
    time_interleaved(functions, order="abba", rule=TimingRule(max_count=3), clock=clock)
    assert "".join(log) == "ABCCBAABC"


def test_random_order_is_fair_within_a_round_and_follows_the_seed(clock: FakeClock) -> None:
    def order_of(seed: int) -> str:
        log: list[str] = []
        functions = {name: (lambda name=name: log.append(name)) for name in "AB"}
        time_interleaved(functions, seed=seed, rule=TimingRule(max_count=9), clock=clock)
        return "".join(log)

    rounds = [order_of(0)[i : i + 2] for i in range(0, 18, 2)]
    assert set(rounds) == {"AB", "BA"}
    assert order_of(0) == order_of(0) != order_of(1)


def test_interleaved_calls_are_compared_round_by_round(clock: FakeClock) -> None:
    drift = [1.0 + i / 10 for i in range(12)]
    functions = {"slow": clock.taking(3 * d for d in drift), "fast": clock.taking(drift)}
    both = time_interleaved(functions, rule=TimingRule(max_count=12, max_seconds=1e6), clock=clock)
    result = both.speed_up(of="fast", over="slow")
    assert result.verdict == "B is faster"
    assert result.ratio == pytest.approx(3.0)
    assert both.speed_up(of="slow", over="fast").ratio == pytest.approx(1 / 3)


def test_interleaved_calls_share_the_longest_warmup(clock: FakeClock) -> None:
    functions = {"cold": clock.taking(chain([9.0] * 3, repeat(1.0))), "warm": clock.taking(repeat(2.0))}
    both = time_interleaved(functions, rule=TimingRule(max_seconds=1e6), clock=clock)
    assert [timing.num_warmup for timing in both.timings.values()] == [3, 3]
    assert both.speed_up(of="cold", over="warm").ratio == 2.0


def test_interleaved_calls_go_on_until_all_are_known(clock: FakeClock) -> None:
    functions = {"steady": clock.taking(repeat(1.0)), "noisy": clock.taking(cycle([1.0, 1.2, 1.1, 0.9, 1.0]))}
    both = time_interleaved(functions, rule=TimingRule(max_seconds=1e6), clock=clock)
    assert len(both.timings["steady"].seconds) == len(both.timings["noisy"].seconds) > 10
    assert all(timing.summary.is_within(0.05) for timing in both.timings.values())


def test_wrong_use_of_interleaving_is_refused(clock: FakeClock) -> None:
    with pytest.raises(UsageError, match="nothing to time"):
        time_interleaved({})
    with pytest.raises(UsageError, match="did you mean 'random'"):
        time_interleaved({"a": int}, order="randm", clock=clock)  # type: ignore[arg-type]
    one = time_interleaved({"fast": int}, rule=TimingRule(max_count=1), clock=clock)
    with pytest.raises(UsageError, match="did you mean 'fast'"):
        one.speed_up(of="fats", over="fast")
