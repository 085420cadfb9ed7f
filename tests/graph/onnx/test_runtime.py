"""ONNX Runtime as an executor: what the contract asks of inference, and a clear refusal to train."""

import pytest
import torch

from tests.graph.cases import CASES, Case
from tests.graph.contract import Subject, check_bad_tensors, check_inference_at, clone, take
from weft.errors import RecipeError, UsageError
from weft.graph import AbstractExecutor, EagerExecutor, Outputs, State
from weft.graph.onnx import EXPORTS, OnnxRuntimeExecutor
from weft.proving.executors import prove_executors
from weft.recipes import digits_cnn
from weft.specs import Batch
from weft.training.build import build_splits, build_task, check_recipe
from weft.training.evaluation import evaluate
from weft.training.recipe import Recipe

SUBJECT = Subject("onnxruntime", OnnxRuntimeExecutor, tolerance=1e-5)
over_cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def trained(case: Case) -> State:
    """A state as training leaves it, running statistics and all."""
    executor = EagerExecutor(case.build(), case.loss)
    state: State = clone(take(executor, executor.initial_state(), case.batch())[2])
    return state


@over_cases
def test_onnx_runtime_infers_as_the_contract_asks(case: Case) -> None:
    check_inference_at(SUBJECT, case, SUBJECT.build(case), trained(case))


@over_cases
def test_onnx_runtime_finds_bad_tensors(case: Case) -> None:
    check_bad_tensors(SUBJECT, case)


def test_a_new_state_is_used_by_the_next_call() -> None:
    case = CASES[0]
    executor, state = SUBJECT.build(case), trained(case)
    first = executor.infer(state, case.batch()).predictions
    doubled = State({name: 2 * p for name, p in state.parameters.items()}, state.buffers, state.random)
    assert not torch.equal(executor.infer(doubled, case.batch()).predictions, first)


class Careless(AbstractExecutor):
    """Infers with the parameters that it was built with, whatever the state says."""

    def __init__(self, case: Case) -> None:
        self._inner = SUBJECT.build(case)

    def initial_state(self) -> State:
        return self._inner.initial_state()

    def __call__(self, state: State, batch: Batch, on_gradient: object) -> tuple[Outputs, State]:
        raise NotImplementedError

    def infer(self, state: State, batch: Batch) -> Outputs:
        return self._inner.infer(State(self.initial_state().parameters, state.buffers, state.random), batch)

    def first_bad_tensor(self, state: State, batch: Batch) -> str | None:
        return None


def test_an_executor_that_ignores_the_state_is_caught() -> None:
    case = CASES[0]
    state = State({name: 2 * p for name, p in trained(case).parameters.items()}, {}, torch.get_rng_state())
    with pytest.raises(AssertionError):
        check_inference_at(SUBJECT, case, Careless(case), state)


def test_training_is_refused() -> None:
    executor = SUBJECT.build(CASES[0])
    with pytest.raises(UsageError, match=r"computes no gradients \(executor: onnxruntime\); train with executor=graph"):
        take(executor, executor.initial_state(), CASES[0].batch())
    with pytest.raises(RecipeError, match=r"computes no gradients \(onnxruntime\)"):
        check_recipe(recipe())


def recipe() -> Recipe:
    chosen = digits_cnn().with_setting("executor", "onnxruntime")
    for key, value in {
        "batch_size": "24",
        "model.channels1": "4",
        "model.channels2": "6",
        "model.hidden": "16",
    }.items():
        chosen = chosen.with_setting(key, value)
    return chosen


def test_a_data_set_is_evaluated_as_by_eager() -> None:
    splits, found = build_splits(recipe()), []
    for name in ("eager", "onnxruntime"):
        task, state = build_task(recipe().with_setting("executor", name), splits, seed=0)
        found.append(evaluate(task.executor, state.model, splits.validation, ("accuracy",)))
    assert found[1]["accuracy"] == found[0]["accuracy"]
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=1e-5)


def test_onnx_runtime_is_proven_by_what_it_evaluates() -> None:
    proof = prove_executors(recipe(), "onnxruntime", "eager", num_steps=2)
    assert proof.passed and 0 < proof.largest_error < 2e-6
    assert proof.finding.startswith("onnxruntime gave the losses and predictions of eager at each of 2 steps")


def test_a_wrong_operator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPORTS, "aten.relu.default", lambda b, node, x: b("Abs", x))
    proof = prove_executors(recipe(), "onnxruntime", "eager", num_steps=1)
    assert not proof.passed and proof.operator is not None
    assert (proof.operator.target, proof.operator.output) == ("aten.relu", "relu")
