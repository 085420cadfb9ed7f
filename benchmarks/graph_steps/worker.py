"""A system in a process of its own that sleeps until it is told, on its standard input, what to do; answers in JSON.

{"load": "gpt, batch 4"}               -> {"losses": [...]}     of the first steps, in hexadecimal
{"run": "gpt, batch 4", "steps": 5}    -> {"seconds": 0.123}    per step
"""

import json
import os
import sys
import time
from collections.abc import Iterator

import torch

from benchmarks.graph_steps.cases import CASES
from benchmarks.graph_steps.systems import SYSTEMS

__all__ = ["main"]

NUM_COMPARED = 10  # losses
NUM_WARMUP = 1  # steps of each turn: what others left in the caches goes


def main(system: str, num_threads: int) -> None:
    # What libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(num_threads)
    loaded: dict[str, Iterator[float]] = {}
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, object]
        try:
            if "load" in command:
                name = command["load"]
                loaded[name] = SYSTEMS[system](CASES[name])
                answer = {"losses": [next(loaded[name]).hex() for _ in range(NUM_COMPARED)]}
            elif "forget" in command:
                loaded.clear()
                answer = {}
            else:
                answer = {"seconds": seconds_per_step(loaded[command["run"]], command["steps"])}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(answer), file=answers, flush=True)


def seconds_per_step(losses: Iterator[float], num_steps: int) -> float:
    for _ in range(NUM_WARMUP):
        next(losses)
    begin = time.perf_counter()
    for _ in range(num_steps):
        next(losses)
    return (time.perf_counter() - begin) / num_steps


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
