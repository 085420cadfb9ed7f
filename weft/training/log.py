"""`log.jsonl`: every event of a run, one line each, as it happens."""

import time
from dataclasses import asdict

from weft.records.run_folder import RunFolder
from weft.training.events import Event, Listener, Stage, StepStarted

__all__ = ["log_to"]


def log_to(folder: RunFolder, seed: int) -> Listener:
    """A listener that appends each event to the run's log. The start of a step, which its end repeats, is left out, and
    what is said only to those who wait."""

    def log(event: Event) -> None:
        if not isinstance(event, StepStarted | Stage):
            folder.append_log({"time": time.time(), "seed": seed, "event": type(event).__name__, **asdict(event)})

    return log
