"""`weave`: a plain PyTorch script, its loop untouched, trained on as many ranks as it was started on.

before    for x, y in loader: ...; loss.backward(); optimizer.step()
with N ranks, inside the same lines:
  loader      every rank gets its share of the same global batch, in the order that rank 0 draws
  backward    gradients are averaged in buckets as they are ready; when backward returns, they are all there
  step        every rank makes the same update
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.data import DataLoader, IterableDataset

from weft.distributed.group.group import AbstractGroup
from weft.distributed.place import LaunchedPlace
from weft.distributed.placement import DataParallel
from weft.distributed.placement.statistics import average_statistics
from weft.distributed.realise import RunSpec, realise
from weft.errors import PlanError, UsageError
from weft.graph import State
from weft.specs import CPU, Plan, as_plan
from weft.specs.axes import DEGREES
from weft.torch_private import shares_memory
from weft.training.process import keep_freed_memory
from weft.training.sampling import share

__all__ = ["weave"]

ModelT = TypeVar("ModelT", bound=nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


def weave(
    model: ModelT, optimizer: OptimizerT, loader: DataLoader[Any], plan: Plan | str = "data"
) -> tuple[ModelT, OptimizerT, Any]:
    """Train the same script on every rank that was started, with the result that one process would give.

    In one process everything is returned as it is. The batch size of the loader is global: ranks share each batch, and
    a rank's loss must be the mean over its samples. Clipping, accumulation and schedulers work as they are. Running
    statistics (batch norm) are each rank's own during an epoch, and their mean when the loader has come to its end.
    With more than one rank, memory that a step frees stays with the process for the next step. The model trains on the
    device that it is on; move it there, and freeze what is not to be trained, before.

    Args:
        plan: "data" (all ranks), or a plan such as "data=2 topology=ring" that the number of ranks must fit. With
            "shard" the optimizer keeps the state of its rank's pieces of parameters only, and has no `state_dict`.

    Example: start with `weft launch --workers 2 script.py` or `torchrun --nproc-per-node 2 script.py`.

        model, optimizer, loader = weft.weave(model, optimizer, loader, plan="data")
    """
    place = LaunchedPlace()
    wanted = _plan_for(plan, place.size)
    if place.size == 1:
        return model, optimizer, loader
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        raise UsageError("loader has no batches of indices to share (an iterable data set); give it a map-style one")
    _check_has_end(loader)
    keep_freed_memory()
    realised = realise(wanted, LaunchedPlace(place.launch, _device_of(model)), RunSpec(whole_gradients=True))
    replicas = realised.__enter__()  # until the process ends
    assert isinstance(replicas, DataParallel), "other plans have been refused"
    replicas.placement.take_over(optimizer, dict(model.named_parameters()))  # first, for it may refuse
    shared = SharedLoader(loader, replicas.group, tuple(model.buffers()))
    GradientHooks(replicas, model, shared, keep=realised)
    return model, optimizer, shared


def _plan_for(plan: Plan | str, num_ranks: int) -> Plan:
    """The plan that `weave` was given, if a loop with an optimizer of its own can carry it out."""
    text = str(plan)
    # A degree without a number stands for all ranks.
    wanted = as_plan(" ".join(f"{word}={num_ranks}" if word in DEGREES else word for word in text.split()))
    if wanted.num_ranks != num_ranks:
        numbers = f"plan: {wanted.num_ranks}, ranks: {num_ranks}"
        raise PlanError(f"plan needs another number of ranks than were started ({numbers}); use plan='data'")
    if wanted.num_shards:
        raise PlanError("servers update parameters themselves, a script's own optimizer does too; use topology=native")
    if not wanted.is_synchronous:
        raise PlanError(
            f"a script's own optimizer takes synchronous steps (consistency: {wanted.consistency}); leave it out"
        )
    return wanted


def _device_of(model: nn.Module) -> torch.device:
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())} or {CPU}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise UsageError(f"model lies on several devices ({names}); move it to one with model.to(device)")
    return devices.pop()


def _check_has_end(loader: DataLoader[Any]) -> None:
    try:
        len(loader)
    except TypeError:
        raise UsageError(
            "loader has no length, and rank 0 draws the batches of a whole epoch; give its sampler a __len__"
        ) from None


class SharedLoader:
    """The user's loader, with rank 0 drawing each epoch's batches and every rank getting its share of each.

    A rank for which a short last batch has nothing left takes one sample with weight zero, so that every rank makes the
    same number of steps.
    """

    def __init__(self, loader: DataLoader[Any], group: AbstractGroup, statistics: tuple[Tensor, ...] = ()) -> None:
        self._batches: Any = loader.batch_sampler
        self._group = group
        self._statistics = statistics
        self._weights: deque[float] = deque()
        self._loader = _with_batches(loader, self)
        self.weight = 1.0 / group.size  # of the batch that was given out last
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        self._weights.clear()
        for batch in self._loader:
            # Workers fetch ahead, so the weight of a batch waits in line until the batch itself is given out.
            self.weight = self._weights.popleft()
            yield batch
        average_statistics(self._group, self._statistics)  # all ranks are here, and an evaluation may follow

    def shares(self) -> Iterator[list[int]]:
        for batch in self._drawn_by_rank_0():
            own = share(batch, self._group.rank, self._group.size)
            self._weights.append(len(own) / len(batch))
            yield own.tolist() if len(own) else batch[:1].tolist()

    def _drawn_by_rank_0(self) -> tuple[Tensor, ...]:
        drawn = [torch.tensor(batch) for batch in self._batches] if self._group.rank == 0 else []
        sizes = _broadcast_whole(self._group, torch.tensor([len(batch) for batch in drawn], dtype=torch.int64))
        indices = _broadcast_whole(self._group, torch.cat(drawn) if drawn else torch.empty(0, dtype=torch.int64))
        return tuple(indices.split(sizes.tolist()))


class _Shares:
    """A batch sampler for a DataLoader: a fresh round of shares for every epoch."""

    def __init__(self, shared: SharedLoader) -> None:
        self._shared = shared

    def __len__(self) -> int:
        return len(self._shared)

    def __iter__(self) -> Iterator[list[int]]:
        return self._shared.shares()


def _with_batches(loader: DataLoader[Any], shared: SharedLoader) -> DataLoader[Any]:
    """The same loader over other batches; a DataLoader does not let its own be changed."""
    return DataLoader(
        loader.dataset,
        batch_sampler=_Shares(shared),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,  # it also draws for the sampler: left out, the order would not be one process's
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        in_order=loader.in_order,
    )


def _broadcast_whole(group: AbstractGroup, tensor: Tensor) -> Tensor:
    """Rank 0's int64 vector, of a length that the others do not know yet."""
    length = torch.tensor([len(tensor)])
    group.broadcast(length)
    whole = tensor if group.rank == 0 else torch.empty(int(length), dtype=torch.int64)
    group.broadcast(whole)
    return whole


class GradientHooks:
    """Averages the gradients of a module's parameters during its backward; kept alive by the hooks themselves.

    Every rank leaves backward with the same gradients, so that one that was there before (accumulation) is the same on
    all ranks, and averaging it once more changes nothing.
    """

    def __init__(self, replicas: DataParallel, model: nn.Module, loader: SharedLoader, keep: object) -> None:
        self._keep = keep
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._loader = loader
        self._is_running = False
        self._untouched: set[str] = set()  # by the backward that runs
        replicas.join(State(dict(model.named_parameters()), dict(model.named_buffers()), torch.empty(0)))
        self._exchange = replicas.exchange
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            if not self._is_running:
                self._is_running, self._untouched = True, set(self._parameters)
                self._exchange.begin(self._loader.weight)
                # autograd calls it when the whole of this backward is done, as DDP has it do.
                Variable._execution_engine.queue_callback(self._end)
            # Views on the way back give two parameters one piece of memory, which would be averaged twice in place.
            if parameter.grad is not None and shares_memory(parameter.grad):
                parameter.grad = parameter.grad.clone()
            self._untouched.discard(name)
            self._exchange.add(name, parameter.grad)

        return add

    @torch.no_grad()
    def _end(self) -> None:
        self._is_running = False
        for name in self._parameters:
            if name in self._untouched:  # what an earlier backward left there counts, should another rank add to it
                self._exchange.add(name, self._parameters[name].grad)
        _, sums = self._exchange.wait()
        own: list[Tensor] = []
        packed: list[Tensor] = []
        for name, parameter in self._parameters.items():
            total = sums[name]
            if total is None or total is parameter.grad:
                continue
            if parameter.grad is None:
                parameter.grad = total.clone()
            else:
                own.append(parameter.grad)
                packed.append(total)
        if own:  # one call for all: they are small and many
            torch._foreach_copy_(own, packed)
