"""A script's model on the stages of a pipeline: forward, loss and backward are one call, all else stays as it is.

    weft.forward_backward(model, loss, x, y)      micro-batches through the stages; gradients of this rank's layers
    optimizer.step()                              of this rank's layers: the others have no gradient
    between epochs, in weft.consensus()           the whole model on every rank: model(x), model.state_dict()

    epoch         | forward_backward, step, ...             | evaluation, saving    | forward_backward ...
    parameters    | of this stage; the others are empty     | all                   | of this stage

The model is cut when the first batch is there to cut it by.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from weft.distributed.placement import DataParallel
from weft.distributed.placement.mesh import MeshGroups
from weft.distributed.placement.pipeline.transport import Form
from weft.distributed.placement.whole import gather_whole
from weft.distributed.script.weaving.momentum import MomentumTaker
from weft.distributed.script.weaving.own_hooks import OwnHook
from weft.distributed.script.weaving.stage_seam import AbstractStages
from weft.distributed.script.weaving.weaving import Weaving, broadcast_in_host_memory
from weft.errors import PlanError, UsageError
from weft.graph import AbstractExecutor, EagerExecutor, State
from weft.graph.executors.random_state import get_random_state, set_random_state
from weft.specs import Batch

__all__ = ["ScriptStages", "check_stages"]


def check_stages(weaving: Weaving) -> None:
    """Refuse what stages of a script cannot do.

    Raises:
        PlanError: what, and what to do instead.
    """
    plan = weaving.plan
    others = [axis for axis in ("shard", "expert", "linear") if getattr(plan, axis) != 1]
    if others or plan.splits_tensors:
        what = f"plan: {plan}"
        raise PlanError(f"stages of a script are replicated on data alone ({what}); use pipeline=N data=M, or a recipe")
    if plan.is_streamed:
        raise PlanError(f"stages of PipeDream update by themselves, and a script does so too (plan: {plan}); use 1f1b")
    if len(weaving.models) > 1:
        raise PlanError(f"plan splits one model, and several are woven (plan: {plan}); weave them with data=N")
    if weaving.loss == "sum":
        raise PlanError(f"micro-batches are averaged, and the loss is a sum (plan: {plan}); use one that is a mean")


@final
class ScriptStages(AbstractStages):
    """The stage of this rank. All ranks call every method, in the same order."""

    def __init__(self, weaving: Weaving, replicas: DataParallel) -> None:
        check_stages(weaving)
        self._weaving, self._replicas = weaving, replicas
        (self._model,) = weaving.models
        mesh = replicas.mesh
        self._stage = mesh.coordinate("pipeline")
        groups = MeshGroups(weaving.world.group, mesh)
        self._replica = groups.one_replica
        weaving.keep_open(closing(groups))
        self._module: nn.Module | None = None  # of this stage, once the model is cut
        self._executor: AbstractExecutor | None = None
        self._loss: Callable[..., Tensor] = _no_loss
        self._held: set[str] = set()  # names of parameters and buffers of this stage
        self._homes: dict[str, int] = {}  # names of parameters and buffers to the first stage that holds each
        self._shapes = {name: parameter.shape for name, parameter in weaving.parameters.items()}
        self._is_whole = True
        self._taker = MomentumTaker(replicas.codec, weaving.optimizers) if replicas.codec.takes_momentum else None
        self.begin_again()
        hook = self._model.register_forward_pre_hook(OwnHook(self._check_whole))
        weaving.attached.append((self._model._forward_pre_hooks, hook.id))
        for optimizer in weaving.optimizers:
            optimizer.register_step_post_hook(lambda *_: weaving.note_step())

    def begin_again(self) -> None:
        self.gather()
        weaving = self._weaving
        broadcast_in_host_memory(weaving.world.group, [*weaving.parameters.values(), *weaving.buffers.values()])

    # Passes.

    def forward_backward(
        self, loss: Callable[..., Tensor], inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]
    ) -> Tensor:
        executor = self._begin(inputs)
        self._loss = loss
        exchange, weaving = self._replicas.exchange, self._weaving
        if self._taker is not None:
            self._taker.follow()
        exchange.begin(weaving.share.weight)
        before = {name: parameter.grad for name, parameter in weaving.trained.items()}  # of batches before this one
        found = torch.zeros((), device=self._device)
        if len(inputs[0]):  # else this replica has no part in the batch
            outputs, after = executor(self._state(), Batch(inputs, targets), exchange.add)
            set_random_state(after.random, self._device)
            found = outputs.loss.detach().clone()
        with weaving.world.waiting("weft.forward_backward", self._replicas.group):
            _, sums = exchange.wait()
        for name, total in sums.items():
            old = before[name]
            new = total if old is None else old if total is None else old.add_(total)
            weaving.parameters[name].grad = new.clone() if new is not None and new is total else new
        self._replica.broadcast(found, self._replica.size - 1)
        return found

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        executor = self._begin(inputs)
        self._loss = _no_loss
        outputs = executor.infer(self._state(), Batch(inputs, (inputs[0],)))
        last = self._replica.size - 1
        found: Any = outputs.predictions
        if self._stage == last and not isinstance(found, Tensor):
            what = type(found).__name__
            raise UsageError(f"output of the model is no tensor ({what}); evaluate between epochs, as model(x)")
        header = Form.of(found if self._stage == last else None).pack()
        self._replica.broadcast(header, last)
        form = Form.unpack(header)
        assert form.shape is not None, "the last stage has predictions"
        output = found.contiguous() if self._stage == last else torch.empty(form.shape, dtype=form.dtype)
        self._replica.broadcast(output, last)
        return output

    def _begin(self, inputs: tuple[Tensor, ...]) -> AbstractExecutor:
        self._weaving.leave_consensus()
        if self._executor is None:
            self._cut(inputs)
        self.release()
        assert self._module is not None and self._executor is not None, "it was cut"
        self._module.training = self._model.training
        return self._executor

    def _cut(self, inputs: tuple[Tensor, ...]) -> None:
        placement = self._replicas.placement
        num_looked_at = max(2, -(-len(inputs[0]) // self._weaving.plan.num_micro_batches))
        placement.look_at(tuple(tensor[:num_looked_at] for tensor in inputs))
        placed = placement.place(self._model)
        # The script says which layers train: its batch norms may be frozen.
        object.__setattr__(placed, "train", lambda mode=True: placed)
        self._module = placed
        self._executor = placement.execute(placed, lambda *given: self._loss(*given), EagerExecutor)
        self._replicas.join(State(dict(placed.named_parameters()), dict(placed.named_buffers()), torch.empty(0)))
        self._note_homes([name for name, _ in (*placed.named_parameters(), *placed.named_buffers())])

    def _note_homes(self, held: list[str]) -> None:
        names = [*self._weaving.parameters, *self._weaving.buffers]
        own = set(held)
        stages = torch.tensor([self._stage if name in own else self._replica.size for name in names])
        self._replica.all_reduce(stages, "min")
        self._homes = dict(zip(names, stages.tolist(), strict=True))
        self._held = own

    def _state(self) -> State:
        assert self._module is not None, "it was cut"
        random = get_random_state(self._device)
        self._replica.broadcast(random)  # stages of a replica draw alike, whatever else their scripts have drawn
        parameters = dict(self._module.named_parameters())
        return State(parameters, dict(self._module.named_buffers()), random)

    @property
    def _device(self) -> torch.device:
        return next(iter(self._weaving.parameters.values())).device

    # The whole model, between epochs.

    @torch.no_grad()
    def gather(self) -> None:
        if self._is_whole or self._module is None:
            return
        self._is_whole = True
        for name, parameter in self._weaving.parameters.items():
            if name not in self._held:
                parameter.data = parameter.data.new_empty(self._shapes[name])
            self._bring(name, parameter.data)
        for name, buffer in self._weaving.buffers.items():
            self._bring(name, buffer)

    def _bring(self, name: str, tensor: Tensor) -> None:
        root = self._homes.get(name, self._replica.size)
        if root < self._replica.size and tensor.numel():
            self._replica.broadcast(tensor, root)

    @torch.no_grad()
    def release(self) -> None:
        if not self._is_whole or self._module is None:
            return
        self._is_whole = False
        self._drop_slots()  # a checkpoint that was loaded brought all
        for name, parameter in self._weaving.parameters.items():
            if name not in self._held:
                parameter.data = parameter.data.new_empty(0)

    @contextmanager
    def use_slots(self) -> Iterator[None]:
        if self._module is None:
            yield
            return
        for number, optimizer in enumerate(self._weaving.optimizers):
            self._gather_slots(optimizer, self._weaving.updated[number])
        try:
            yield
        finally:
            self._drop_slots()

    def _gather_slots(self, optimizer: torch.optim.Optimizer, updated: Mapping[str, Tensor]) -> None:
        """In the order of names, in which every rank then has them."""
        own = {
            f"slot/{name}/{key}": value
            for name, parameter in updated.items()
            if name in self._held
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }
        for entry, value in gather_whole(self._replica, lambda _name: None, own).items():
            name, _, key = entry.removeprefix("slot/").rpartition("/")
            if name not in self._held:
                optimizer.state[updated[name]][key] = value.to(self._device) if value.ndim else value

    def _drop_slots(self) -> None:
        for optimizer, updated in zip(self._weaving.optimizers, self._weaving.updated, strict=True):
            for name, parameter in updated.items():
                if name not in self._held:
                    optimizer.state.pop(parameter, None)

    def _check_whole(self, *_: Any) -> None:
        if not self._is_whole:
            raise UsageError(
                f"layers of other stages are not on this rank (plan: {self._weaving.plan}); call "
                "weft.forward_backward(model, loss, inputs, targets), weft.forward(model, inputs), or model(x) between "
                "epochs"
            )


def _no_loss(predictions: Any, *_targets: Any) -> Tensor:
    """Of a forward pass alone."""
    return torch.zeros(())
