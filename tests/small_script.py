"""Scripts of users as text, and how to trace one on virtual ranks, which takes no processes."""

from pathlib import Path
from typing import Any

from weft.distributed.group import AbstractGroup
from weft.distributed.script.observation.events import ScriptEnded
from weft.distributed.script.observation.tracing import TraceRequest, supervise
from weft.distributed.script.weaving.weaving import use_weavings
from weft.distributed.script.world.world import World, use_world
from weft.distributed.virtual import run_virtual
from weft.proving.script_proof import Run
from weft.simulation.computation import ComputeModel
from weft.simulation.place import VirtualPlace
from weft.simulation.script_process import ScriptCode, ScriptState, use_script_process
from weft.specs import parse_plan_for

__all__ = ["HEAD", "LOOP", "SCRIPT", "run_traced", "write_script"]

HEAD = """
import sys, torch, weft
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

own = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(22, 3, generator=own), torch.randn(22, 1, generator=own))
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(data, 8, shuffle=True)
"""

LOOP = """
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
print("loss of", *sys.argv[1:], "is small")
"""

SCRIPT = HEAD + "model, optimizer, loader = weft.weave(model, optimizer, loader)" + LOOP
"""Six steps, the third and the last of six samples."""


def write_script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path


def run_traced(path: Path) -> Run:
    """How `prove_script` is to run a script: on virtual ranks of this process."""
    free = ComputeModel(0.0, 0.0, 0.0, {})

    def run(request: TraceRequest, num_ranks: int) -> None:
        plan, shared = parse_plan_for("data", num_ranks), dict[str, Any]()
        with use_script_process(path, []) as nowhere:
            code = ScriptCode(path)

            def program(group: AbstractGroup) -> None:
                place = VirtualPlace(group, (), free, shared)
                world = World(place, None, supervise(group.rank, **request.to_json()))
                with use_world(world), use_weavings(world):
                    code.run(group.rank, plan.num_ranks, nowhere, is_silent=True)
                    world.supervision.tell(ScriptEnded())

            run_virtual(program, num_ranks, state=ScriptState())

    return run
