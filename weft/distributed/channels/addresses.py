"""The addresses of one process: a worker, and servers or a responder beside it in threads; or one of them alone."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from weft.distributed.channels.background import Body, run_in_background
from weft.distributed.mailbox import AbstractMailbox
from weft.distributed.place import AbstractPlace
from weft.specs import Plan

__all__ = ["use_addresses"]


@contextmanager
def use_addresses(
    plan: Plan, place: AbstractPlace, serve: Callable[[AbstractMailbox], Callable[[], object]]
) -> Iterator[AbstractMailbox | None]:
    """The mailbox of this process's worker, while the others answer until all workers have left; None where there is
    no worker, when that has been done.

    Args:
        serve: makes, for the mailbox of a server or responder, the call that serves.
    """
    kinds, bodies = plan.roles.kinds, dict[str, Body]()
    with ExitStack() as opened:
        for address in place.addresses(plan):
            if kinds[address] != "worker":
                mailbox = place.open_mailbox(plan, address)
                opened.callback(mailbox.close)
                bodies[f"{kinds[address]} {address}"] = serve(mailbox), mailbox.close
        workers = [address for address in place.addresses(plan) if kinds[address] == "worker"]
        if not workers:
            ((answer, _),) = bodies.values()
            answer()
            opened.close()
            yield None
            return
        (rank,) = workers
        with run_in_background(bodies):
            own = place.open_mailbox(plan, rank)
            try:
                yield own
            finally:
                own.close()  # which a responder is told, and ends
