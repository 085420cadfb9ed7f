"""A rank that sleeps until it is told, on its standard input, what to train and how many steps; answers in JSON.

{"load": "mlp"}   -> {"ready": true}
{"run": 5}        -> {"seconds_per_step": 0.123}
"""

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks.steps.cases import CASES
from benchmarks.steps.systems import SYSTEMS

__all__ = ["main"]

NUM_WARMUP, NUM_COOLDOWN = 1, 1


def main(system: str) -> None:
    # What libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    steps: Iterator[None] = iter(())
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if "load" in command:
                del steps
                gc.collect()
                steps = _load(system, command["load"])
                _say(answers, {"ready": True})
            else:
                _say(answers, time_steps(steps, command["run"]))
        except Exception as error:
            steps = iter(())
            traceback.print_exc()
            _say(answers, {"error": f"{type(error).__name__}: {error}".splitlines()[0]})


def time_steps(steps: Iterator[None], num_steps: int) -> dict[str, float]:
    """Mean seconds of the steps in the middle: in the first the ranks come together, in the last they part.

    `cpu` counts all threads of this process, and not what it waits for: other work on the machine disturbs it less.
    """
    for _ in range(NUM_WARMUP):
        next(steps)
    begin, cpu_begin = time.perf_counter(), time.process_time()
    for _ in range(num_steps):
        next(steps)
    wall, cpu = time.perf_counter() - begin, time.process_time() - cpu_begin
    for _ in range(NUM_COOLDOWN):
        next(steps)
    return {"wall": wall / num_steps, "cpu": cpu / num_steps}


def _load(system: str, case: str) -> Iterator[None]:
    if "WEFT_MEETING" in os.environ:  # every case meets anew
        meeting = Path(os.environ["WEFT_MEETING"]).with_name(case)
        meeting.mkdir(exist_ok=True)
        os.environ["WEFT_MEETING"] = str(meeting)
    steps = SYSTEMS[system](CASES[case])
    next(steps)
    return steps


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
