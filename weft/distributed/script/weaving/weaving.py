"""A weaving: the models, optimizers and loader of one call of `weave`, and the ranks under them.

    epoch     | batch batch ... batch |  evaluation, saving, ...  | batch ...
    weights   | each rank's own       |  the consensus of all     | each rank's own again
              begin_epoch             end_epoch                   begin_epoch

Where ranks are synchronous all of these are the same weights.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from weft.distributed.codecs import write
from weft.distributed.consistency.server import ServedReplicas
from weft.distributed.group.group import AbstractGroup
from weft.distributed.placement import DataParallel
from weft.distributed.placement.statistics import average_statistics
from weft.distributed.script.data.batch_share import BatchShare
from weft.distributed.script.data.epochs import AbstractEpochs
from weft.distributed.script.weaving.consensus import agreed_weights
from weft.distributed.script.weaving.dtensors import as_trained
from weft.distributed.script.weaving.gradients import Backward
from weft.distributed.script.weaving.incoming import Loss
from weft.distributed.script.weaving.names import name_buffers, name_parameters, parameters_of
from weft.distributed.script.weaving.own_hooks import Attachment
from weft.distributed.script.weaving.stage_seam import AbstractStages
from weft.distributed.script.weaving.torch_parallel import TorchParallel
from weft.distributed.script.weaving.torch_updates import OwnUpdates, write_slots
from weft.distributed.script.weaving.writes import ParameterWrites
from weft.distributed.script.world.world import World
from weft.errors import UsageError
from weft.graph import State
from weft.specs import Plan
from weft.training.checkpoint import Entry
from weft.training.replicas import AbstractReplicas

__all__ = ["Slots", "Weaving", "close_weavings", "use_weavings", "weavings_of"]

Slots = Mapping[str, Mapping[str, Tensor]]
"""The state of optimizers, by the names of parameters and slots."""


@final
class Weaving(AbstractEpochs):
    """Args:
    share: this rank's part of the batch that was handed out last.
    loss: of the script: over the items of a batch.
    torch_parallel: how PyTorch has laid out the models, where it has.
    """

    def __init__(
        self,
        world: World,
        plan: Plan,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        share: BatchShare,
        loss: Loss = "mean",
        torch_parallel: TorchParallel | None = None,
    ) -> None:
        self.world = world
        self.plan = plan
        self.models = tuple(models)
        self.optimizers = tuple(optimizers)
        self.loss: Loss = loss
        self.loader: Any = None
        self.parameters: dict[str, nn.Parameter] = name_parameters(models)
        self.updated = [parameters_of(optimizer, self.parameters) for optimizer in optimizers]  # by each optimizer
        self.replicas: AbstractReplicas | None = None  # none in one process
        self.backward: Backward | None = None  # where gradients are exchanged in it
        self.stages: AbstractStages | None = None  # where the model is cut into some
        self.updates: OwnUpdates | None = None  # where a plan's steps are taken at optimizer.step()
        self.writes: ParameterWrites | None = None  # where servers hold the weights
        self.attached: list[Attachment] = []  # to modules
        self.torch_parallel = torch_parallel
        self.num_steps = 0  # calls of optimizer.step()
        self._share = share
        self._opened = ExitStack()
        self._is_held = False  # the consensus, by the models
        self._home: dict[str, Tensor] | None = None  # this rank's own weights meanwhile, where they differ from it
        self._loaded: set[str] = set()  # models or optimizers got a state_dict of which the ranks have not agreed
        self._rounds_missed = 0

    @property
    def share(self) -> BatchShare:
        return self._share

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Asked for anew, as modules replace theirs."""
        return name_buffers(self.models)

    @property
    def reduced(self) -> frozenset[int]:
        """Parameters whose gradients PyTorch averages, by identity."""
        return self.torch_parallel.reduced if self.torch_parallel is not None else frozenset()

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    @property
    def state(self) -> State:
        own = {name: parameter for name, parameter in self.parameters.items() if id(parameter) not in self.reduced}
        return State({name: as_trained(parameter) for name, parameter in own.items()}, self.buffers, torch.empty(0))

    # Epochs and the consensus.

    def begin_epoch(self) -> None:
        self.leave_consensus()
        self.agree_on_loading()

    def end_epoch(self) -> None:
        if self.replicas is None:
            return
        self._check_models()
        # Ranks at a pace of their own may leave a step out, each by itself.
        facts = {"number of optimizer steps": self.num_steps} if self.plan.is_synchronous else {}
        with self.world.meeting("end of an epoch", facts, same_line=False):
            average_in_host_memory(self.world.replicas, self.buffers.values())
            self.enter_consensus()

    def _check_models(self) -> None:
        """Once in an epoch: a layer that was put in after `weave` is updated by an optimizer that is not woven."""
        woven = {id(parameter) for parameter in self.parameters.values()}
        for model in self.models:
            for name, parameter in model.named_parameters():
                if id(parameter) not in woven:
                    raise UsageError(
                        f"model has got a parameter after weave, which no rank exchanges ({name}); weave it last"
                    )

    @contextmanager
    def use_consensus(self) -> Iterator[None]:
        was_held = self._is_held
        self.enter_consensus()
        try:
            with (
                self.replicas.placement.use_whole() if self.replicas is not None else nullcontext(),
                self.stages.use_slots() if self.stages is not None else nullcontext(),
            ):
                yield
        finally:
            if not was_held:
                self.leave_consensus()

    def enter_consensus(self) -> None:
        """A collective call. Of what the script has loaded since, all ranks agree first: it is the consensus then."""
        if self.writes is not None and not self._loaded:
            self.writes.check()
        self.agree_on_loading()
        agreed = None if self._is_held else agreed_weights(self.replicas, self.world.group)
        if self.stages is not None:
            self.stages.gather()
        self._is_held = True
        if agreed is not None:
            self._home = {name: self.parameters[name].detach().clone() for name in agreed}
            write({name: self.parameters[name] for name in agreed}, agreed)
            self._note_writes()

    def leave_consensus(self) -> bool:
        """Put this rank's own weights back; whether the consensus was held."""
        was_held, home, self._is_held, self._home = self._is_held, self._home, False, None
        if home is not None:
            if self.writes is not None:
                self.writes.check()
            write({name: self.parameters[name] for name in home}, home)
            self._note_writes()
        return was_held

    def _note_writes(self) -> None:
        """Parameters are as they are by what was agreed, not by the script."""
        if self.writes is not None:
            self.writes.note()

    def own_weights(self) -> Mapping[str, Tensor]:
        """This rank's, also while the models hold the consensus."""
        return {**{name: parameter.detach() for name, parameter in self.parameters.items()}, **(self._home or {})}

    # Rounds that a rank was late for.

    def note_step(self, rounds_missed: int = 0) -> None:
        """A step was taken; of the next ones so many are rounds that the others have closed without this rank."""
        self.num_steps += 1
        self._rounds_missed += rounds_missed

    def is_late(self) -> bool:
        return self._rounds_missed > 0

    def pass_over_step(self) -> None:
        """The next step is of a round that is closed. It counts as one, as on the ranks that were in time."""
        self.num_steps += 1
        self._rounds_missed -= 1

    # States that come from elsewhere.

    def note_loading(self, kind: str) -> None:
        """A model, or an optimizer, has got a state_dict. Ranks agree on it when they next meet."""
        self._loaded.add(kind)
        if kind == "model":
            self._home = None  # what was loaded is what goes on

    def forget_loading(self) -> None:
        """Weights that were loaded are each rank's own."""
        self._loaded.clear()

    def settle_loading(self) -> None:
        """In the middle of an epoch: every rank has loaded the same, and goes on from it. A collective call then."""
        if self._loaded and self.replicas is not None:
            self.begin_again(keeps_state="optimizer" not in self._loaded)

    def agree_on_loading(self) -> None:
        """Where a rank has loaded a state, all go on from rank 0's. A collective call."""
        if self.replicas is None:
            return
        marks = torch.tensor([float(bool(self._loaded)), float("optimizer" in self._loaded)])
        with self.world.waiting("states that were loaded", self.world.group):
            self.world.group.all_reduce(marks)
        if marks[0]:
            self.begin_again(keeps_state=not marks[1])

    def begin_again(self, *, keeps_state: bool = False) -> None:
        """All ranks go on with rank 0's parameters and buffers, as its script has loaded them. A collective call.

        Args:
            keeps_state: of optimizers at servers that state stays which they have; else it becomes rank 0's own.
        """
        if self.stages is not None:
            self._loaded.clear()
            self.stages.begin_again()
            return
        slots = self.collect_slots() if keeps_state else self._own_slots()
        self.restore(slots)

    def collect_slots(self) -> Slots:
        """The state of the optimizers; that which servers keep is fetched from them."""
        if isinstance(self.replicas, ServedReplicas) and self.updates is not None:
            return self.replicas.fetch_state(self.updates.state).slots
        return self._own_slots()

    def _own_slots(self) -> Slots:
        return self.updates.read().slots if self.updates is not None else {}

    def restore(self, slots: Slots | None = None, unsent: Mapping[str, Entry] | None = None) -> None:
        """Go on with rank 0's parameters and buffers, and with this state of optimizers at servers; elsewhere theirs is
        as the script has it. A collective call.

        Args:
            unsent: entries of what this rank's codec kept back from servers.
        """
        self._home = None
        self._rounds_missed = 0
        self._loaded.clear()
        if isinstance(self.replicas, DataParallel):
            self.replicas.level(self.state)  # of those that hold the same parts
        else:
            broadcast_in_host_memory(self.world.group, [*self.parameters.values(), *self.buffers.values()])
        if self.replicas is None:
            return
        entries = {f"slot/{name}/{slot}": Entry(t) for name, own in (slots or {}).items() for slot, t in own.items()}
        is_served = isinstance(self.replicas, ServedReplicas)
        count = torch.tensor(float(self.num_steps), dtype=torch.float64)
        known = {**entries, **(unsent or {}), "optimizer/step": Entry(count)}
        self.replicas.remember(0 if is_served else self.num_steps, known)
        self._note_writes()

    def show_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer the state that servers keep in its place, for its state_dict."""
        slots = self.collect_slots()
        for name, parameter in self.updated[self.optimizers.index(optimizer)].items():
            write_slots(optimizer, parameter, slots.get(name, {}))

    # The end.

    def keep_open(self, context: Any) -> Any:
        """Enter a context manager that ends with this weaving."""
        return self._opened.enter_context(context)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the others: to serve until they have left, or, after an error, at once."""
        self._opened.__exit__(type(error) if error is not None else None, error, None)


def weavings_of(world: World) -> list[Weaving]:
    """Those of this rank that are open."""
    return cast(list[Weaving], world.weavings)


def close_weavings(world: World, error: BaseException | None = None) -> None:
    """The script of this rank has ended, well or by an error. Whoever runs virtual ranks calls it; real processes do
    when they end."""
    woven, world.weavings[:] = weavings_of(world)[:], []
    for weaving in reversed(woven):
        weaving.close(error)


@contextmanager
def use_weavings(world: World) -> Iterator[None]:
    """Run a script on a virtual rank, and leave the others as it ends."""
    try:
        yield
    except BaseException as error:
        with suppress(type(error)):
            close_weavings(world, error)
        raise
    close_weavings(world)


@torch.no_grad()
def average_in_host_memory(group: AbstractGroup, tensors: Iterable[Tensor]) -> None:
    """As average_statistics, over a group for tensors of the CPU."""
    own = list(tensors)
    staged = [tensor.cpu() for tensor in own]
    average_statistics(group, staged)
    _write_back(own, staged)


@torch.no_grad()
def broadcast_in_host_memory(group: AbstractGroup, tensors: Iterable[Tensor]) -> None:
    """Rank 0's tensors on every rank, in place."""
    own = [tensor.detach() for tensor in tensors]
    staged = [tensor.cpu() for tensor in own]
    for tensor in staged:
        group.broadcast(tensor)
    _write_back(own, staged)


def _write_back(own: Sequence[Tensor], staged: Sequence[Tensor]) -> None:
    for tensor, copy in zip(own, staged, strict=True):
        if copy is not tensor:
            tensor.copy_(copy)
