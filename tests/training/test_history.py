"""What a run keeps of its past, and carries through a checkpoint."""

import json
import math

from weft.records.record import Evaluation
from weft.records.strict_json import decode_json, encode_json
from weft.training.events import (
    EpochStarted,
    EvaluationEnded,
    EvaluationStarted,
    Notice,
    Progress,
    StepEnded,
    StepResult,
    StepStarted,
)
from weft.training.history import History

PROGRESS = Progress(step=1, samples=4, total_samples=8, epoch=0.5)


def filled() -> History:
    history = History()
    for i in range(3):
        history(StepStarted(PROGRESS))
        history(StepEnded(PROGRESS, StepResult(loss=i / 3, lr=0.1, num_samples=4 - i), seconds=0.5 * i))
    evaluation = Evaluation(3, 9, 0.9, 1.5, {"validation/loss": 0.25, "validation/max_error": math.inf})
    history(EvaluationEnded(PROGRESS, "validation", evaluation))
    return history


def test_steps_and_evaluations_are_kept() -> None:
    history = filled()
    assert history.losses == [0, 1 / 3, 2 / 3]
    assert history.step_seconds == [0, 0.5, 1.0]
    assert history.step_samples == [4, 3, 2]
    assert [evaluation.step for evaluation in history.evaluations] == [3]


def test_everything_else_is_not() -> None:
    history = History()
    for event in (EpochStarted(0), StepStarted(PROGRESS), EvaluationStarted(PROGRESS, "validation"), Notice("x")):
        history(event)
    assert history == History()


def test_through_the_json_of_a_checkpoint_and_on() -> None:
    text = json.dumps(encode_json(filled().to_dict()), allow_nan=False)
    history = History()
    history.restore(decode_json(json.loads(text)))
    assert history == filled()
    history(StepEnded(PROGRESS, StepResult(loss=0.0, lr=0.1, num_samples=1), seconds=2.0))
    assert len(history.losses) == 4 and len(filled().losses) == 3


def test_two_histories_share_nothing() -> None:
    # Deep500 built its metrics once, as default arguments, and one test's numbers leaked into the next.
    filled()
    assert History().losses == [] and History().evaluations == []
