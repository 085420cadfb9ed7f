"""The numbers of one repetition, from what it kept and what it scored."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median

import torch
from torch import Tensor

from weft.metrics.metric import Rule
from weft.records.record import Evaluation, RunRecord, Verdict
from weft.training.history import History
from weft.training.replicas import Traffic

__all__ = ["hash_tensors", "judge", "to_target", "values_of"]


def values_of(
    history: History, target: Rule | None, wall_clock: float, scores: Mapping[str, float]
) -> dict[str, float]:
    """One value per metric; `scores` are those of the final model, by `split/metric`."""
    last = history.evaluations[-1].values if history.evaluations else {}
    rates = [n / s for n, s in zip(history.step_samples, history.step_seconds, strict=True) if s > 0]
    values = {**last, **scores, **to_target(history.evaluations, target), "wall_clock": wall_clock}
    if rates:
        values |= {"throughput": median(rates), "step_time": median(history.step_seconds)}
    if any(traffic.num_bytes for traffic in history.step_traffic):
        # Where most steps exchange nothing (replicas that meet seldom) a median would be zero.
        is_regular = all(traffic.num_bytes for traffic in history.step_traffic)
        average = median if is_regular else fmean
        values |= {
            "communication_exposed": average([traffic.exposed for traffic in history.step_traffic]),
            "communication_hidden": average([traffic.hidden for traffic in history.step_traffic]),
            "bytes_per_step": average([float(traffic.num_bytes) for traffic in history.step_traffic]),
            **_of_compression(history.step_traffic, average),
        }
    if any(traffic.activation_bytes for traffic in history.step_traffic):
        values["activation_bytes"] = median(float(traffic.activation_bytes) for traffic in history.step_traffic)
    return values


def _of_compression(steps: Sequence[Traffic], average: Callable[[Sequence[float]], float]) -> dict[str, float]:
    """Where something was sent instead of tensors, and it was counted how much."""
    payload = sum(traffic.payload_bytes for traffic in steps)
    if not payload:
        return {}
    values = {
        "wire_bytes_per_step": average([float(traffic.wire_bytes) for traffic in steps]),
        "payload_ratio": sum(traffic.dense_bytes for traffic in steps) / payload,
        "communication_time": average([traffic.under_way for traffic in steps]),
    }
    if any(traffic.coding for traffic in steps):  # a virtual clock stands still meanwhile
        values["compression_time"] = average([traffic.coding for traffic in steps])
    return values


def to_target(evaluations: Sequence[Evaluation], target: Rule | None) -> dict[str, float]:
    """Time, epochs and samples until the first evaluation that met the target; infinity if none did."""
    if target is None:
        return {}
    for evaluation in evaluations:
        if target.accepts(evaluation.values[f"validation/{target.metric}"]):
            return _to_target(evaluation.seconds, evaluation.epoch, evaluation.samples)
    return _to_target(math.inf, math.inf, math.inf)


def _to_target(seconds: float, epochs: float, samples: float) -> dict[str, float]:
    return {"time_to_target": seconds, "epochs_to_target": epochs, "samples_to_target": samples}


def judge(rules: Sequence[Rule], record: RunRecord) -> tuple[Verdict, ...]:
    """Each acceptance rule against the median over repetitions.

    A repetition without the value, or whose value is not a number, counts as the worst there is: among numbers that
    cannot be ordered a median would be arbitrary.
    """
    verdicts = []
    for rule in rules:
        worst = -math.inf if rule.accepts(math.inf) else math.inf
        found = [repetition.values.get(rule.metric, worst) for repetition in record.repetitions]
        value = median(worst if math.isnan(value) else value for value in found)
        verdicts.append(Verdict(str(rule), value, rule.accepts(value)))
    return tuple(verdicts)


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names and bytes: equal exactly when every bit is."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
