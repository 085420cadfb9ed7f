"""Probes of the cost of a step and of the order of samples, taken once, off the clock."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median

import torch

from weft.metrics.energy import start_energy_meter
from weft.metrics.flops import count_flops, share_of_peak
from weft.metrics.memory import use_process_memory_peak, use_tensor_memory_peak
from weft.metrics.sampling import dataset_bias, sampler_order
from weft.metrics.timing import synchronise_device
from weft.training.events import Event
from weft.training.loop import Task, TrainingState, take_step
from weft.training.replicas import SoloReplicas
from weft.training.sampling import Ordered, Sampler, SamplerState

__all__ = ["ResourceWatch", "probe_data", "probe_scaling", "probe_step", "probe_waiting", "use_resource_watch"]


@dataclass
class ResourceWatch:
    """A listener that reads what must be read while training runs; `values` is whole when the watch ends."""

    is_idle: bool = False  # reads nothing
    values: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._energy = None if self.is_idle else start_energy_meter()[0]

    def __call__(self, _event: Event) -> None:
        if self._energy is not None:
            self.values["energy"] = self._energy.update()


@contextmanager
def use_resource_watch(*, is_idle: bool = False) -> Iterator[ResourceWatch]:
    watch = ResourceWatch(is_idle)
    if is_idle:
        yield watch
        return
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

    mesh, flops = task.replicas.mesh, count_flops(step) / len(batch)
    if mesh.num_ranks > mesh.num_replicas:  # each has counted the layers, or parts of layers, that it holds
        flops = task.replicas.sum(torch.tensor([flops], dtype=torch.float64)).item() / mesh.num_replicas
    device = state.model.device
    with use_tensor_memory_peak(device) as peak:
        step()
    return {
        "flops_per_sample": flops,
        "flop_rate": flops * throughput,
        "share_of_peak": share_of_peak(flops * throughput, device),
        "peak_tensor_memory": float(peak.num_bytes),
    }


def probe_scaling(
    task: Task, state: TrainingState, step_time: float, now: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """The price of working together: the steps of one rank alone, on as many samples as it had, against those of all.

    Rank 0 takes the steps while the others wait. Its state is put back, for it is what was trained. Where it needs the
    others to compute there is no such number.
    """
    mesh, placement = task.replicas.mesh, task.replicas.placement
    if mesh.num_ranks == 1 or mesh.num_replicas < mesh.num_ranks or placement.takes_forwards_together:
        return {}
    alone = median(_steps_alone(task, state, now)) if mesh.rank == 0 else 0.0
    task.replicas.sum(torch.zeros(1))  # the others wait here
    return {"scaling_efficiency": alone / step_time, "communication_overhead": step_time - alone}


def _steps_alone(task: Task, state: TrainingState, now: Callable[[], float]) -> list[float]:
    """Seconds of each of some steps by this rank on its own, on its share of a batch."""
    kept = {name: tensor.detach().clone() for name, tensor in state.model.parameters.items()}
    buffers = {name: tensor.clone() for name, tensor in state.model.buffers.items()}
    order = Ordered(len(task.splits.train))
    sampler = Sampler(order, max(1, task.sampler.batch_size // task.replicas.mesh.num_replicas), drop_last=True)
    alone = replace(task, replicas=SoloReplicas(), sampler=sampler)
    state = replace(state, optimizer=task.optimizer.init(state.model.parameters), sampler=SamplerState())
    seconds: list[float] = []
    while len(seconds) < 5 or (sum(seconds) < 1.0 and len(seconds) < 50):
        started = now()
        state, _ = take_step(alone, state)
        synchronise_device(state.model.device)
        seconds.append(now() - started)
    with torch.no_grad():
        for own, before in ((state.model.parameters, kept), (state.model.buffers, buffers)):
            for name, tensor in own.items():
                tensor.copy_(before[name])
    return seconds


def probe_waiting(task: Task) -> dict[str, float]:
    """The measurements of the executors of all ranks, as means. Called by all ranks."""
    found = task.executor.measured()
    total = task.replicas.sum(torch.tensor(list(found.values()), dtype=torch.float64)).tolist() if found else []
    return {name: number / task.replicas.mesh.num_ranks for name, number in zip(found, total, strict=True)}


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
