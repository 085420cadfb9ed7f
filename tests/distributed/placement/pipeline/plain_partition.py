"""A plain cut for the tests of the executor: runs of a Sequential's layers, of about as many each."""

from typing import Any

from torch import Tensor, nn

from weft.distributed.placement.pipeline.stages import Partition, StageProgram
from weft.errors import PlanError

__all__ = ["Run", "cut_evenly"]


class Run(nn.Module):
    """Layers one after the other, under the names that they have in the whole model."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        for layer in self.children():
            x = layer(x)
        return (x,)


def cut_evenly(module: nn.Module, _inputs: tuple[Tensor, ...], num_stages: int) -> Partition:
    """Every layer with parameters takes those after it along."""
    assert isinstance(module, nn.Sequential), "made for the tests"
    runs: list[dict[str, nn.Module]] = [{}]
    for name, layer in module.named_children():
        if any(True for _ in layer.parameters()) and any(list(m.parameters()) for m in runs[-1].values()):
            runs.append({})
        runs[-1][name] = layer
    if len(runs) < num_stages:
        raise PlanError(f"more stages than layers (stages: {num_stages}, layers: {len(runs)}); use fewer stages")
    bounds = [len(runs) * i // num_stages for i in range(num_stages + 1)]
    programs = []
    for i in range(num_stages):
        layers: dict[str, nn.Module] = {}
        for run in runs[bounds[i] : bounds[i + 1]]:
            layers |= run
        outputs = "output" if i == num_stages - 1 else f"h{i + 1}"
        programs.append(StageProgram(Run(layers), (f"h{i}" if i else "input/0",), (outputs,)))
    return Partition(tuple(programs), _tied(programs))


def _tied(programs: list[StageProgram]) -> dict[str, tuple[int, ...]]:
    holders: dict[Any, list[int]] = {}
    for number, program in enumerate(programs):
        for name, _ in program.module.named_parameters():
            holders.setdefault(name, []).append(number)
    return {name: tuple(numbers) for name, numbers in holders.items() if len(numbers) > 1}
