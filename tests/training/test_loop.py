"""The loop: what happens when, and what a step does."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.training.planted import (
    Recorder,
    StopAt,
    TinyData,
    build_tiny,
    clock_of_ticks,
    hash_of,
    ignore,
    loss_of_the_second_evaluation,
    module_of_every_kind,
    run_tiny,
    uninterrupted,
)
from weft.errors import DivergedError
from weft.specs import Batch
from weft.training import events
from weft.training.datasets import AbstractDataset
from weft.training.events import Event
from weft.training.history import History
from weft.training.loop import is_evaluation_due, train
from weft.training.optimizers import (
    AbstractRule,
    Momentum,
    Optimizer,
    Scope,
    Shared,
    Slots,
)
from weft.training.results import hash_tensors
from weft.training.sampling import SamplerState

# ---- events


def test_events_come_in_this_order() -> None:
    task, state = build_tiny(epochs=1.2, evaluate_every=5)
    recorder = Recorder()
    train(task, state, emit=recorder, save=ignore, clock=clock_of_ticks())
    assert [picture(event) for event in recorder.events] == [
        "TrainingStarted 0/12",
        "EpochStarted 0",
        "StepStarted 0/12",
        "StepEnded 4/12 of 4",
        "StepStarted 4/12",
        "StepEnded 8/12 of 4",
        "EvaluationStarted 8/12",
        "EvaluationEnded 8/12 at step 2",
        "StepStarted 8/12",
        "StepEnded 10/12 of 2",
        "EpochEnded 0",
        "EvaluationStarted 10/12",
        "EvaluationEnded 10/12 at step 3",
        "EpochStarted 1",
        "StepStarted 10/12",
        "StepEnded 14/12 of 4",
        "EvaluationStarted 14/12",
        "EvaluationEnded 14/12 at step 4",
        "TrainingEnded 14/12 all samples used",
    ]


def picture(event: Event) -> str:
    words: list[object] = [type(event).__name__]
    if isinstance(event, events.EpochStarted | events.EpochEnded):
        words.append(event.epoch)
    elif not isinstance(event, events.Notice | events.Stage):
        words.append(f"{event.progress.samples}/{event.progress.total_samples}")
    if isinstance(event, events.StepEnded):
        words.append(f"of {event.result.num_samples}")
    elif isinstance(event, events.EvaluationEnded):
        words.append(f"at step {event.evaluation.step}")
    elif isinstance(event, events.TrainingEnded):
        words.append(event.reason)
    return " ".join(map(str, words))


def test_events_carry_where_training_stands() -> None:
    task, state = build_tiny(epochs=1.0)
    recorder = Recorder()
    final, reason = train(task, state, emit=recorder, save=ignore, clock=clock_of_ticks())
    first, last = recorder.events[0], recorder.events[-1]
    assert isinstance(first, events.TrainingStarted) and first.num_parameters == 3 * 6 + 6 + 6 + 6 + 6 + 1
    assert isinstance(last, events.TrainingEnded) and last.reason == reason == "all samples used"
    assert last.progress == events.Progress(step=3, samples=10, total_samples=10, epoch=1.0)
    assert (final.step, final.samples, final.sampler) == (3, 10, SamplerState(1, 0))
    assert [event.seconds for event in recorder.events if isinstance(event, events.StepEnded)] == [1.0, 1.0, 1.0]


def test_state_is_offered_for_saving_after_every_step() -> None:
    task, state = build_tiny()
    saved: list[tuple[int, int]] = []
    train(task, state, emit=ignore, save=lambda s: saved.append((s.step, s.samples)), clock=clock_of_ticks())
    assert saved == [(1, 4), (2, 8), (3, 10), (4, 14), (5, 18), (6, 20)]


# ---- evaluation


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12), period=st.integers(1, 20), data=st.data())
def test_each_multiple_of_the_period_is_followed_by_one_evaluation(
    sizes: list[int], period: int, data: st.DataObject
) -> None:
    total = data.draw(st.integers(1, sum(sizes)))
    task, state = build_tiny(evaluate_every=period)
    task = replace(task, total_samples=total)
    due = []
    for size in sizes:
        state = replace(state, samples=state.samples + size)
        if is_evaluation_due(task, state):
            due.append(state.samples)
            state = replace(state, evaluated=state.samples)
        assert not is_evaluation_due(task, state)
        if state.samples >= total:
            break
    reached = [sum(sizes[: i + 1]) for i in range(len(sizes)) if sum(sizes[:i]) < total]
    passed = {next(samples for samples in reached if samples >= m) for m in range(period, reached[-1] + 1, period)}
    assert due == sorted(passed | {reached[-1]})


def test_nothing_is_evaluated_before_the_first_step() -> None:
    assert not is_evaluation_due(*build_tiny(evaluate_every=1))


def test_evaluation_holds_the_values_of_the_validation_split() -> None:
    final, history = uninterrupted(evaluate_every=100)
    (evaluation,) = history.evaluations
    task, _ = build_tiny()
    outputs = task.executor.infer(final.model, task.splits.validation.take(torch.arange(6)))
    target = task.splits.validation.take(torch.arange(6)).targets[0]
    assert evaluation.values == {
        "validation/loss": pytest.approx(outputs.loss.item(), rel=1e-6),
        "validation/max_error": pytest.approx((outputs.predictions - target).abs().max().item(), rel=1e-6),
    }
    assert (evaluation.step, evaluation.samples, evaluation.epoch) == (6, 20, 2.0)


# ---- the end


def test_training_ends_at_the_first_evaluation_that_meets_the_target() -> None:
    target, history = loss_of_the_second_evaluation(), History()
    task, state = build_tiny(evaluate_every=4, target=target)
    final, reason = train(task, state, emit=history, save=ignore)
    assert (final.samples, len(history.evaluations), final.target_met) == (8, 2, True)
    assert reason == f"target reached ({target})"


def test_a_stop_gives_its_reason() -> None:
    task, state = build_tiny()
    recorder = Recorder()

    def emit(event: Event) -> None:
        recorder(event)
        stop(event)

    stop = StopAt(events.StepEnded, 2)
    final, reason = train(task, state, emit=emit, save=ignore)
    assert (final.step, reason) == (2, "asked to")
    assert picture(recorder.events[-1]) == "TrainingEnded 8/20 asked to"


def test_other_exceptions_of_a_listener_are_not_swallowed() -> None:
    def fail(event: Event) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        run_tiny(*build_tiny(), fail)


# ---- what a step does


def test_same_start_same_bits_and_no_use_of_the_global_generator() -> None:
    before = torch.get_rng_state()
    first = hash_of(uninterrupted()[0])
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert hash_of(uninterrupted()[0]) == first


def test_the_schedule_counts_samples() -> None:
    asked: list[int] = []

    def schedule(samples: int) -> float:
        asked.append(samples)
        return 1 / (1 + samples)

    task, state = build_tiny()
    recorder = Recorder()
    train(replace(task, schedule=schedule), state, emit=recorder, save=ignore)
    assert asked == [0, 4, 8, 10, 14, 18]
    rates = [event.result.lr for event in recorder.events if isinstance(event, events.StepEnded)]
    assert rates == [0.05 * (1 / (1 + samples)) for samples in asked]


def test_the_loop_gives_the_bits_of_a_plain_pytorch_loop() -> None:
    final, history = uninterrupted(clip_norm=0.7)
    task, state = build_tiny()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = module_of_every_kind()
    optimizer = torch.optim.SGD(module.parameters(), momentum=0.9)
    place, losses, samples = SamplerState(), [], 0
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state.model.random)
        while samples < 20:
            indices, after = task.sampler.next_batch(place)
            batch = task.splits.train.take(indices, place.epoch)
            optimizer.param_groups[0]["lr"] = 0.05 * (1 - 0.5 * samples / 20)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(module(*batch.inputs), batch.targets[0])
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.7)
            optimizer.step()
            losses.append(loss.item())
            samples, place = samples + len(indices), after
    assert history.losses == losses
    expected = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert hash_tensors({**final.model.parameters, **final.model.buffers}) == hash_tensors(expected)


class OneAhead(AbstractRule):
    """Plain descent along the gradient at parameter + 1."""

    @property
    def scope(self) -> Scope:
        return "element"

    def initial_slots(self, parameter: Tensor) -> Slots:
        return {}

    def new_input(self, shared: Shared) -> Shared:
        return shared

    def prepare_param(self, parameter: Tensor, slots: Slots, shared: Shared) -> Tensor:
        return parameter.detach() + 1

    def update_rule(self, gradient: Tensor, parameter: Tensor, slots: Slots, shared: Shared) -> tuple[Tensor, Slots]:
        return parameter - shared.lr.to(parameter) * gradient, slots


def test_an_optimizer_that_looks_ahead_gets_its_gradient_there() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.tensor(3.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.value.expand(len(x), 1)

    task, state = build_tiny(Constant, lambda: Optimizer(OneAhead(), lr=0.25))
    targets = task.splits.train.take(task.sampler.next_batch(SamplerState())[0]).targets[0]
    final = run_tiny(task, state, StopAt(events.StepEnded, 1))
    expected = 3.0 - 0.25 * 2 * (4.0 - targets.mean().item())  # from 3, along the gradient at 4
    assert final.model.parameters["value"].item() == pytest.approx(expected, rel=1e-6)


# ---- divergence


class Spoiled(AbstractDataset):
    """A data set with a sample that is not a number."""

    def __init__(self, bad_index: int) -> None:
        self._inner, self._bad_index = TinyData(10), bad_index

    def __len__(self) -> int:
        return len(self._inner)

    def take(self, indices: Tensor, epoch: int = 0) -> Batch:
        batch = self._inner.take(indices, epoch)
        inputs = batch.inputs[0].masked_fill((indices == self._bad_index).unsqueeze(1), math.nan)
        return replace(batch, inputs=(inputs,))

    def checksum(self) -> str:
        return "spoiled"


def test_a_loss_that_is_not_a_number_names_step_and_tensor() -> None:
    task, state = build_tiny(train=Spoiled(5), shuffle=False)
    recorder = Recorder()
    with pytest.raises(DivergedError, match=r"\(step: 1, loss: nan, first bad tensor: input 0\); lower the learning"):
        run_tiny(task, state, recorder)
    assert isinstance(recorder.events[-1], events.StepStarted)
    assert all(bool(p.isfinite().all()) for p in state.model.parameters.values())


@pytest.mark.parametrize(("epochs", "step"), [(0.4, 1), (2.0, 1)], ids=["at the last step", "before"])
def test_an_update_that_overflows_is_seen(epochs: float, step: int) -> None:
    # After the last step no training loss is left to show it: the evaluation does.
    task, state = build_tiny(lambda: nn.Linear(3, 1), lambda: Optimizer(Momentum(), lr=1e38), epochs=epochs)
    with pytest.raises(DivergedError, match=rf"\(step: {step}, loss: (inf|nan), first bad tensor: "):
        run_tiny(task, state)


def test_an_overflow_inside_the_model_is_named() -> None:
    class Exploding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 1e30).exp()

    module = lambda: nn.Sequential(nn.Linear(3, 2), Exploding(), nn.BatchNorm1d(2), nn.Linear(2, 1))  # noqa: E731
    with pytest.raises(DivergedError, match=r"\(step: 0, loss: nan, first bad tensor: output of 1\)"):
        run_tiny(*build_tiny(module))
