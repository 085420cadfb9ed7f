"""How each system trains a case: its own idiom around one plain loop.

Each is a function from a case to an endless iterator that makes one step per `next`. It is called in every rank, with
the environment of that rank set as the system's own launcher would set it.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
import torch.distributed as distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import weft
from benchmarks.steps.cases import BATCH_SIZE, Case, loss_of, make_optimizer
from weft.training.process import keep_freed_memory

__all__ = ["SYSTEMS", "System"]

System = Callable[[Case], Iterator[None]]


def plain(case: Case) -> Iterator[None]:
    """PyTorch in one process that talks to nobody."""
    model = case.make_model()
    loader = DataLoader(case.make_dataset(), batch_size=BATCH_SIZE, shuffle=True)
    return plain_loop(model, make_optimizer(model), loader)


def plain_keeping_memory(case: Case) -> Iterator[None]:
    """The same, with the setting of the C library that `weave` makes: what is left is what the exchange costs."""
    keep_freed_memory()
    return plain(case)


def woven(case: Case) -> Iterator[None]:
    model = case.make_model()
    loader = DataLoader(case.make_dataset(), batch_size=BATCH_SIZE * weft.num_ranks, shuffle=True)
    return plain_loop(*weft.weave(model, make_optimizer(model), loader, plan="data"))


def plain_by_hand(case: Case) -> Iterator[None]:
    """Batches that the script draws itself, as language models do."""
    model = case.make_model()
    return plain_loop(model, make_optimizer(model), _drawn(case, lambda *batch: batch))


def woven_by_hand(case: Case) -> Iterator[None]:
    model = case.make_model()
    model, optimizer, _ = weft.weave(model, make_optimizer(model), None)
    return plain_loop(model, optimizer, _drawn(case, weft.share))


def plain_evaluation(case: Case) -> Iterator[None]:
    return _evaluate(case.make_model(), DataLoader(case.make_dataset(), batch_size=BATCH_SIZE))


def woven_evaluation(case: Case) -> Iterator[None]:
    """The same through `weft.evaluation`, of a model that is woven."""
    model, _, _ = weft.weave(case.make_model(), None, None)
    return _evaluate(model, weft.evaluation(DataLoader(case.make_dataset(), batch_size=BATCH_SIZE)))


def ddp_over_gloo(case: Case) -> Iterator[None]:
    return _ddp(case, "gloo")


def ddp_over_weft(case: Case) -> Iterator[None]:
    from weft.distributed.torch_backend import register

    register()
    return _ddp(case, "weft")


def fabric(case: Case) -> Iterator[None]:
    # torchrun's variables in the environment tell it that its ranks exist. On the CPU its "ddp" is over Gloo.
    whole = import_module("lightning_fabric").Fabric(accelerator="cpu", devices=2, strategy="ddp")
    whole.launch()
    model, optimizer = _model_and_optimizer(case)
    model, optimizer = whole.setup(model, optimizer)
    loader = whole.setup_dataloaders(DataLoader(case.make_dataset(), batch_size=BATCH_SIZE, shuffle=True))
    return plain_loop(model, optimizer, loader, whole.backward)


def accelerate(case: Case) -> Iterator[None]:
    accelerator = import_module("accelerate").Accelerator(cpu=True)
    model, optimizer = _model_and_optimizer(case)
    loader = DataLoader(case.make_dataset(), batch_size=BATCH_SIZE, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    return plain_loop(model, optimizer, loader, accelerator.backward)


def deepspeed(case: Case) -> Iterator[None]:
    library = import_module("deepspeed")
    model, optimizer = _model_and_optimizer(case)
    config = {"train_micro_batch_size_per_gpu": BATCH_SIZE, "gradient_accumulation_steps": 1}
    engine, *_ = library.initialize(model=model, optimizer=optimizer, config=config)
    for x, y in _endless(_loader_of_rank(case)):
        engine.backward(loss_of(engine(x), y))
        engine.step()
        yield


SYSTEMS: dict[str, System] = {
    "plain": plain,
    "plain keeping memory": plain_keeping_memory,
    "weft": woven,
    "plain by hand": plain_by_hand,
    "weft by hand": woven_by_hand,
    "plain evaluation": plain_evaluation,
    "weft evaluation": woven_evaluation,
    "ddp gloo": ddp_over_gloo,
    "ddp weft": ddp_over_weft,
    "fabric": fabric,
    "accelerate": accelerate,
    "deepspeed": deepspeed,
}


def plain_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    backward: Callable[[Any], Any] = torch.Tensor.backward,
) -> Iterator[None]:
    """The loop of a user's script, endless."""
    for x, y in _endless(loader):
        optimizer.zero_grad()
        backward(loss_of(model(x), y))
        optimizer.step()
        yield


def _drawn(case: Case, share: Callable[..., Any]) -> Iterator[Any]:
    data = case.make_dataset()
    while True:
        yield share(*data[torch.randint(len(data), (BATCH_SIZE,))])


def _evaluate(model: nn.Module, loader: Any) -> Iterator[None]:
    model.eval()
    for x, y in _endless(loader):
        with torch.no_grad():
            loss_of(model(x), y)
        yield


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _model_and_optimizer(case: Case) -> tuple[Any, Any]:
    model = case.make_model()
    return model, make_optimizer(model)


def _ddp(case: Case, backend: str) -> Iterator[None]:
    if not distributed.is_initialized():
        distributed.init_process_group(backend)
    model = DistributedDataParallel(case.make_model())
    return plain_loop(model, make_optimizer(model), _loader_of_rank(case))


def _loader_of_rank(case: Case) -> DataLoader[Any]:
    dataset = case.make_dataset()
    return DataLoader(dataset, batch_size=BATCH_SIZE, sampler=DistributedSampler(dataset))
