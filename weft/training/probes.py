"""What a step costs and what the sampler does, measured once, off the clock."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from weft.metrics.energy import start_energy_meter
from weft.metrics.flops import count_flops, share_of_peak
from weft.metrics.memory import use_process_memory_peak, use_tensor_memory_peak
from weft.metrics.sampling import dataset_bias, sampler_order
from weft.training.events import Event
from weft.training.loop import Task, TrainingState
from weft.training.sampling import SamplerState

__all__ = ["ResourceWatch", "probe_data", "probe_step", "use_resource_watch"]


@dataclass
class ResourceWatch:
    """A listener that reads what must be read while training runs; `values` is whole when the watch ends."""

    values: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._energy, _ = start_energy_meter()

    def __call__(self, _event: Event) -> None:
        if self._energy is not None:
            self.values["energy"] = self._energy.update()


@contextmanager
def use_resource_watch() -> Iterator[ResourceWatch]:
    watch = ResourceWatch()
    with use_process_memory_peak() as peak:
        yield watch
    watch.values["peak_process_memory"] = float(peak.num_bytes)


def probe_step(task: Task, state: TrainingState, throughput: float) -> dict[str, float]:
    """FLOPs and tensor memory of one more step, whose gradients are thrown away. The state is consumed.

    Args:
        throughput: samples per second that training reached, from which the rate follows.
    """
    indices, _ = task.sampler.next_batch(SamplerState())
    batch = task.splits.train.take(indices)

    def step() -> None:
        task.executor(state.model, batch, lambda _name, _gradient: None)

    flops = count_flops(step) / len(batch)
    with use_tensor_memory_peak() as peak:
        step()
    return {
        "flops_per_sample": flops,
        "flop_rate": flops * throughput,
        "share_of_peak": share_of_peak(flops * throughput),
        "peak_tensor_memory": float(peak.num_bytes),
    }


def probe_data(task: Task) -> dict[str, float]:
    """How uneven the classes are, and how far the first epoch's order is from sorted."""
    labels = task.splits.train.labels()
    bias = {} if labels is None else {"dataset_bias": dataset_bias(labels, task.splits.task.num_outputs).distance}
    return {**bias, "sampler_order": sampler_order(_first_epoch(task))}


def _first_epoch(task: Task) -> torch.Tensor:
    batches, state = [], SamplerState()
    while state.epoch == 0:
        indices, state = task.sampler.next_batch(state)
        batches.append(indices)
    return torch.cat(batches)
