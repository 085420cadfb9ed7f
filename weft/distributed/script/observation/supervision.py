"""The supervision of a script by the command that runs it: who watches it, what is tried, where decisions are kept."""

import json
import os
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from weft.distributed.script.observation.events import Observer, ScriptEvent
from weft.specs.loading import load

__all__ = [
    "SUPERVISION_VARIABLE",
    "Supervision",
    "find_supervision",
    "seed_generators",
    "supervision_variables",
]

SUPERVISION_VARIABLE = "WEFT_SUPERVISION"
"""An import path and arguments as JSON, as of a rank program: called with them and the rank, it gives a supervision."""


@dataclass(frozen=True)
class Supervision:
    """Nothing, of a script that was simply started.

    Args:
        observers: see what happens (events.py).
        changes: arguments of `weave` that take the place of the script's.
        run: the folder in which servers and pairs record what they decide.
        replay: the folder of the run whose decisions are repeated.
        is_silent: what the script prints is not shown.
    """

    observers: tuple[Observer, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    run: Path | None = None
    replay: Path | None = None
    is_silent: bool = False

    def tell(self, event: ScriptEvent) -> None:
        for observer in self.observers:
            observer(event)


def supervision_variables(path: str, **arguments: Any) -> dict[str, str]:
    """The environment of ranks whose script is supervised by what the import path makes of the arguments."""
    return {SUPERVISION_VARIABLE: json.dumps({"path": path, "arguments": arguments})}


def find_supervision(rank: int, environment: Mapping[str, str] = os.environ) -> Supervision:
    """That which the environment tells of."""
    if SUPERVISION_VARIABLE not in environment:
        return Supervision()
    asked = json.loads(environment[SUPERVISION_VARIABLE])
    found: Supervision = load(asked["path"])(rank=rank, **asked["arguments"])
    return found


def seed_generators(seed: int) -> None:
    """Of torch, Python and NumPy, so that a script that does not seed them begins the same twice."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
