"""From a recipe, which is data, to the parts that train."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from weft.errors import RecipeError, UsageError
from weft.graph import AbstractExecutor, EagerExecutor, GraphExecutor, Loss, ReferenceExecutor, TapeProgram
from weft.graph.executors.random_state import seed_random_state
from weft.metrics.metric import find_metric
from weft.metrics.quality import QUALITY
from weft.specs import Plan, find_device
from weft.training.component import Component, build, check_options
from weft.training.datasets import DATASETS, Splits
from weft.training.loop import Task, TrainingState
from weft.training.losses import LOSSES
from weft.training.models import MODELS
from weft.training.optimizers import OPTIMIZERS, AbstractOptimizer
from weft.training.optimizers.offloading import OffloadedOptimizer
from weft.training.recipe import Mutable, Recipe
from weft.training.replicas import AbstractReplicas, SoloReplicas
from weft.training.sampling import SAMPLERS
from weft.training.schedules import SCHEDULES
from weft.training.weights import is_weights, load_weights, read_weights
from weft.training.whole_step import step_in_one

__all__ = [
    "EXECUTORS",
    "FOR_INFERENCE",
    "ON_ANY_DEVICE",
    "TOLERANCES",
    "build_optimizer",
    "build_splits",
    "build_task",
    "check_recipe",
    "derive_seed",
]


def _eager(
    module: nn.Module, loss: Loss, *, autocast: Literal["none", "bfloat16", "float16"] = "none"
) -> AbstractExecutor:
    return EagerExecutor(module, loss, autocast=None if autocast == "none" else getattr(torch, autocast))


def _graph(
    module: nn.Module, loss: Loss, *, autocast: Literal["none", "bfloat16", "float16"] = "none"
) -> AbstractExecutor:
    return GraphExecutor(module, loss, autocast=None if autocast == "none" else getattr(torch, autocast))


def _inductor(
    module: nn.Module, loss: Loss, *, autocast: Literal["none", "bfloat16", "float16"] = "none"
) -> AbstractExecutor:
    return GraphExecutor(module, loss, autocast=None if autocast == "none" else getattr(torch, autocast), fused=True)


def _reference(module: nn.Module, loss: Loss) -> AbstractExecutor:
    return ReferenceExecutor(module, loss)


def _tape(module: nn.Module, loss: Loss) -> AbstractExecutor:
    return GraphExecutor(module, loss, make_program=lambda graph, sunk: TapeProgram(graph, sunk=sunk))


def _jax(module: nn.Module, loss: Loss) -> AbstractExecutor:
    try:
        from weft.graph.jax import JaxProgram
    except ModuleNotFoundError as error:
        raise UsageError(f"executor jax needs a package ({error.name}); pip install 'weft[jax]'") from error
    return GraphExecutor(module, loss, make_program=lambda graph, sunk: JaxProgram(graph, sunk=sunk))


def _onnxruntime(module: nn.Module, loss: Loss) -> AbstractExecutor:
    try:
        from weft.graph.onnx import OnnxRuntimeExecutor
    except ModuleNotFoundError as error:
        raise UsageError(f"executor onnxruntime needs a package ({error.name}); pip install 'weft[onnx]'") from error
    return OnnxRuntimeExecutor(module, loss)


EXECUTORS: Mapping[str, Callable[..., AbstractExecutor]] = {
    "eager": _eager,
    "graph": _graph,
    "inductor": _inductor,
    "jax": _jax,
    "onnxruntime": _onnxruntime,
    "reference": _reference,
    "tape": _tape,
}

TOLERANCES: Mapping[str, float] = {"inductor": 2e-5, "jax": 2e-5, "onnxruntime": 2e-5, "reference": 2e-5}
"""How far a step of an executor may be from eager mode, relative to each tensor's largest value; 0 for the others."""

FOR_INFERENCE = frozenset({"onnxruntime"})
"""Executors that compute no gradients."""

SAMPLE = 2
"""Samples that a placement looks at before it cuts a model."""

ON_ANY_DEVICE = frozenset({"eager", "reference"})
"""Executors that compute where the module is; the others compile for the CPU, or run a library that does."""

_CATALOGUES: Mapping[str, Mapping[str, Callable[..., object]]] = {
    "model": MODELS,
    "data": DATASETS,
    "loss": LOSSES,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "sampler": SAMPLERS,
    "executor": EXECUTORS,
}


def check_recipe(recipe: Recipe, *, is_training: bool = True) -> None:
    """Refuse what cannot be built or makes no sense, before anything is loaded or written."""
    fixed, mutable = recipe.fixed, recipe.mutable
    for kind, catalogue in _CATALOGUES.items():
        component: Component = getattr(fixed if hasattr(fixed, kind) else mutable, kind)
        check_options(component, catalogue, kind)
    if is_training and mutable.executor.name in FOR_INFERENCE:
        raise RecipeError(f"executor computes no gradients ({mutable.executor.name}); train with executor=graph")
    _check_device(mutable)
    if mutable.init and not is_weights(Path(mutable.init)):
        read_weights(Path(mutable.init))  # which says why there are none
    for name in fixed.metrics:
        if name not in QUALITY:
            find_metric(name)  # an unknown name gets its own error
            raise RecipeError(f"metric is not one that an evaluation computes ({name}); known: {', '.join(QUALITY)}")
    if fixed.target and fixed.target.metric not in ("loss", *fixed.metrics):
        raise RecipeError(f"target is not evaluated (target: {fixed.target.metric}); add it to the recipe's metrics")
    positive = {
        "epochs": fixed.epochs,
        "evaluate_every": fixed.evaluate_every,
        "batch_size": mutable.batch_size,
        "accumulate": mutable.accumulate,
        "clip_norm": mutable.clip_norm,
        "checkpoint_steps": mutable.checkpoint_steps,
        "checkpoint_seconds": mutable.checkpoint_seconds,
    }
    for key, value in positive.items():
        if value is not None and value <= 0:
            raise RecipeError(f"value must be positive ({key}: {value}); --set {key}=1")
    if mutable.accumulate > mutable.batch_size:
        numbers = f"accumulate: {mutable.accumulate}, batch_size: {mutable.batch_size}"
        raise RecipeError(f"more micro-batches than samples in a batch ({numbers}); lower accumulate")
    plan = mutable.plan
    if plan.is_streamed and mutable.accumulate > 1:
        raise RecipeError(
            f"a minibatch of PipeDream is one batch (accumulate: {mutable.accumulate}); --set accumulate=1"
        )
    if plan.num_replicas > mutable.batch_size:
        numbers = f"ranks: {plan.num_replicas}, batch_size: {mutable.batch_size}"
        raise RecipeError(f"more ranks than samples in a batch ({numbers}); raise batch_size or use fewer ranks")
    if (plan.shard > 1 or plan.linear > 1 or plan.splits_tensors) and build_optimizer(recipe).scope == "tensor":
        numbers = f"optimizer: {mutable.optimizer}, plan: {plan}"
        cure = "use one that is element-wise, such as adam, or data=N"
        raise RecipeError(f"optimizer needs whole tensors, and ranks hold pieces ({numbers}); {cure}")
    if plan.channel == "servers":
        _check_servers(recipe)


def _check_device(mutable: Mutable) -> None:
    device = find_device(mutable.device)
    if device.type != "cpu" and mutable.executor.name not in ON_ANY_DEVICE:
        what = f"executor: {mutable.executor.name}, device: {device}"
        raise RecipeError(f"executor computes on the CPU alone ({what}); use executor=eager, or --device cpu")


def _check_servers(recipe: Recipe) -> None:
    mutable, plan = recipe.mutable, recipe.mutable.plan
    is_in_rounds = not plan.is_synchronous and not plan.commits_on_arrival
    if mutable.clip_norm is not None and is_in_rounds and plan.num_servers > 1:
        numbers = f"clip_norm: {mutable.clip_norm}, shards: {plan.num_servers}"
        cure = "use consistency=async, of which ranks clip" if plan.splits_model else "use topology=server(shards=1)"
        raise RecipeError(f"no shard knows the norm of the whole sum ({numbers}); {cure}")
    if mutable.clip_norm is not None and plan.is_synchronous and plan.splits_model:
        numbers = f"clip_norm: {mutable.clip_norm}, servers: {plan.num_servers}"
        raise RecipeError(f"servers of one part do not know the norm of the others ({numbers}); use topology=native")
    optimizer = build_optimizer(recipe)
    if plan.splits_tensors and optimizer.scope != "element":
        numbers = f"optimizer: {mutable.optimizer}, tensor: {plan.tensor}"
        cure = "use one that is element-wise, such as adam, or topology=native"
        raise RecipeError(f"optimizer needs whole tensors, and servers hold parts of them ({numbers}); {cure}")


def build_splits(recipe: Recipe) -> Splits:
    """Load the data: the first touch, where the clock starts."""
    splits = build(recipe.fixed.data, DATASETS, "data")
    for name in ("train", "validation", "test"):
        if len(getattr(splits, name)) == 0:
            raise UsageError(f"data set has an empty split (data: {splits.name}, split: {name}); give it samples")
    return splits


def build_optimizer(recipe: Recipe) -> AbstractOptimizer:
    """The recipe's optimizer: the same every time, whoever updates."""
    optimizer: AbstractOptimizer = build(recipe.mutable.optimizer, OPTIMIZERS, "optimizer")
    return optimizer


def _place_state(optimizer: AbstractOptimizer, plan: Plan) -> AbstractOptimizer:
    return OffloadedOptimizer(optimizer) if plan.offloads_state else optimizer


def build_task(
    recipe: Recipe,
    splits: Splits,
    seed: int,
    replicas: AbstractReplicas | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Task, TrainingState]:
    """The parts of a training and its state at step 0, which depend on the recipe, the data, the seed and the rank.

    A model is built on the CPU and moved, so that it begins with the same bits on every device.

    Args:
        device: of this rank; by default the one that the recipe's wish means for one process.
        dtype: in which the model computes, from the weights that it has as it is; by default as it is.
    """
    device = find_device(recipe.mutable.device) if device is None else device
    replicas = replicas or SoloReplicas()
    fixed, mutable = recipe.fixed, recipe.mutable
    size = len(splits.train)
    total_samples = max(1, round(fixed.epochs * size))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "model"))
        module = build(fixed.model, MODELS, "model", splits.task)
    if mutable.init:
        load_weights(module, read_weights(Path(mutable.init)), mutable.init)
    module = module.to(device, dtype)
    loss: Loss = build(fixed.loss, LOSSES, "loss")
    placement = replicas.placement
    splits = splits.on(device, dtype)
    placement.look_at(splits.train.take(torch.arange(min(size, _num_looked_at(mutable)))).inputs)
    executor = placement.execute(
        placement.place(module), loss, lambda part, loss: build(mutable.executor, EXECUTORS, "executor", part, loss)
    )
    task = Task(
        splits=splits,
        executor=executor,
        optimizer=_place_state(replicas.adopt(build_optimizer(recipe)), mutable.plan),
        schedule=build(mutable.schedule, SCHEDULES, "schedule", total_samples, size),
        sampler=build(
            mutable.sampler, SAMPLERS, "sampler", splits.train, mutable.batch_size, derive_seed(seed, "sampler")
        ),
        total_samples=total_samples,
        evaluate_every=max(1, round(fixed.evaluate_every * size)),
        metrics=fixed.metrics,
        target=fixed.target,
        accumulate=mutable.accumulate,
        clip_norm=mutable.clip_norm,
        replicas=replicas,
    )
    random = seed_random_state(derive_seed(seed, f"dropout/{replicas.mesh.replica}"), device)
    model = replace(task.executor.initial_state(), random=random)
    if isinstance(replicas, SoloReplicas) and task.accumulate == 1:
        task = replace(task, step_in_one=step_in_one(task.executor, task.optimizer, model, task.clip_norm))
    return task, TrainingState(model, task.optimizer.init(replicas.placement.owned(model.parameters)))


def _num_looked_at(mutable: Mutable) -> int:
    """Samples that are enough to see what layers make of them; where a cut hangs on their number, a micro-batch."""
    plan = mutable.plan
    passes = plan.num_replicas * plan.num_micro_batches * mutable.accumulate
    return max(SAMPLE, -(-mutable.batch_size // passes)) if plan.cuts_by_samples else SAMPLE


def derive_seed(seed: int, purpose: str) -> int:
    """Independent seeds from one: a run with one more dropout layer still sees the same order of samples."""
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
