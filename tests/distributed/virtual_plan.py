"""A plan realised on virtual ranks, for tests: some work on every rank, with faults, and mailboxes that record."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

from weft.distributed.group import AbstractGroup
from weft.distributed.mailbox import AbstractMailbox, MailFault, RecordingMailbox
from weft.distributed.place import AbstractPlace
from weft.distributed.place.topology import algorithm_of
from weft.distributed.realise import RunSpec, realise
from weft.distributed.virtual import TEN_GIGABIT, VirtualResult, run_virtual
from weft.planning.network import NetworkModel
from weft.simulation.computation import ComputeModel
from weft.simulation.place import VirtualPlace, with_host_servers
from weft.specs import Plan, as_plan
from weft.training.optimizers import AbstractOptimizer

__all__ = ["FREE", "RecordingPlace", "run_plan"]

FREE = ComputeModel(seconds_per_pass=0.0, seconds_per_sample=0.0, seconds_per_update=0.0, ready={})


@final
class RecordingPlace(AbstractPlace):
    """Wraps a place; mailboxes that are opened there record."""

    def __init__(self, inner: AbstractPlace, shared: dict[str, Any], mailboxes: dict[int, RecordingMailbox]) -> None:
        super().__init__(shared)
        self._inner = inner
        self._mailboxes = mailboxes

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def size(self) -> int:
        return self._inner.size

    @property
    def patience(self) -> float:
        return self._inner.patience

    @property
    def snapshots(self) -> Path | None:
        return self._inner.snapshots

    def size_for(self, plan: Plan) -> int:
        return self._inner.size_for(plan)

    def addresses(self, plan: Plan) -> tuple[int, ...]:
        return self._inner.addresses(plan)

    def open_group(self, plan: Plan) -> AbstractGroup:
        return self._inner.open_group(plan)

    def open_world(self, num_ranks: int) -> AbstractGroup | None:
        return self._inner.open_world(num_ranks)

    def open_ranks(self, plan: Plan) -> AbstractGroup | None:
        return self._inner.open_ranks(plan)

    def open_notes(self) -> None:
        return None

    def open_mailbox(self, plan: Plan, address: int) -> AbstractMailbox:
        self._mailboxes[address] = RecordingMailbox(self._inner.open_mailbox(plan, address))
        return self._mailboxes[address]

    def charge_updates(self, optimizer: AbstractOptimizer, fraction: float) -> AbstractOptimizer:
        return self._inner.charge_updates(optimizer, fraction)

    def mark_joined(self) -> None:
        self._inner.mark_joined()


def run_plan(
    plan: Plan | str,
    work: Callable[[AbstractGroup, Any], Any],
    *,
    spec: RunSpec | None = None,
    faults: Sequence[MailFault] = (),
    mailboxes: dict[int, RecordingMailbox] | None = None,
    network: NetworkModel = TEN_GIGABIT,
) -> VirtualResult:
    """Call `work(group, replicas)` on every rank; servers and responders serve."""
    chosen, shared = as_plan(plan), dict[str, Any]()

    def program(group: AbstractGroup) -> Any:
        inner = VirtualPlace(group, faults, FREE, shared)  # type: ignore[arg-type]  # some faults are mailboxes' alone
        place = RecordingPlace(inner, shared, {} if mailboxes is None else mailboxes)
        with realise(chosen, place, spec) as replicas:
            return None if replicas is None else work(group, replicas)

    return run_virtual(
        program,
        chosen.roles.num_addresses,
        network=with_host_servers(network, chosen),
        choice=algorithm_of(chosen),
        timeout=1e6,
    )
