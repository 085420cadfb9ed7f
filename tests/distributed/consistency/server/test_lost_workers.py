"""Workers that are lost in one training and missed in the next, or that come back to shards which are not as far."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.consistency.server.served import (
    LR,
    Course,
    make_parameters,
    momentum,
    pull,
    serve_through_falls,
    spec_of,
    work,
)
from weft.distributed.consistency.server import ServedReplicas, Settings, serve, settings_of
from weft.distributed.consistency.server.protocol import Tag
from weft.distributed.consistency.server.session import Session
from weft.distributed.group import AbstractGroup
from weft.distributed.group.faulty import Kill
from weft.distributed.mailbox import FaultyMailbox, VirtualMailbox
from weft.distributed.virtual import die, run_virtual
from weft.graph import State
from weft.specs import parse_plan
from weft.training.replicas import Update


@pytest.mark.parametrize("scheme", ["async", "stale(2,commit=arrival)", "stale(1)", "backup(0)", "backup(1)"])
def test_who_was_lost_is_not_waited_for_in_the_next_training(scheme: str) -> None:
    plan = parse_plan(f"data=3 consistency={scheme} topology=server(place=own)")
    course = Course(plan)

    def program(group: AbstractGroup) -> Any:
        mailbox = FaultyMailbox(VirtualMailbox(group), [Kill(2, after_seconds=0.1)], die=die)
        if group.rank >= plan.num_ranks:
            return serve(mailbox, spec_of(course, group.rank - plan.num_ranks))
        replicas = ServedReplicas(mailbox, settings_of(plan, momentum(), None), (0, 1))
        work(replicas, course, group.clock.charge)
        found = work(replicas, course, group.clock.charge)
        mailbox.close()
        return found

    first, second, lost, _ = run_virtual(program, plan.roles.num_addresses, timeout=1e6).results
    assert lost is None
    assert torch.equal(first["w1"], second["w1"]) and not torch.equal(first["w1"], make_parameters()["w1"])


def test_running_statistics_stay_the_ranks_own_when_a_shard_is_restored(tmp_path: Path) -> None:
    """Once, a restored shard 0 sent everybody those that rank 0 had begun with."""
    plan = parse_plan("data=2 consistency=async topology=server(place=own)")
    course = Course(plan, falls={2: (0.2, 0.1)}, kept=tmp_path)

    def program(group: AbstractGroup) -> list[float] | None:
        if group.rank >= 2:
            serve_through_falls(group, course)
            return None
        mailbox, parameters = VirtualMailbox(group), make_parameters()
        replicas = ServedReplicas(mailbox, settings_of(plan, momentum(), None), (0,))
        counter = torch.full((1,), float(group.rank))
        replicas.join(State(parameters, {"running": counter}, torch.zeros(0)))
        state, seen, step = momentum().init(parameters), [counter.item()], 0
        while (step := replicas.next_step(step)) < 30:
            add = replicas.begin(0.5)
            for name in reversed(parameters):
                group.clock.charge(0.005)
                add(name, pull(parameters[name], 0, step))
            counter += 1
            _, state = replicas.finish(0.0, Update(momentum(), parameters, state, LR, None))
            seen.append(counter.item())
        replicas.sum(torch.ones(1))
        mailbox.close()
        return seen

    for seen in run_virtual(program, 3, timeout=1e6).results[:2]:
        assert seen == [float(number) for number in range(len(seen))], (
            "all begin with rank 0's, and go on with their own"
        )


def test_who_comes_back_tells_the_other_shards_what_the_first_let_it_take() -> None:
    """A shard that had not closed the round before would else wait for this rank's part in it for ever."""
    settings = Settings(num_workers=1, num_shards=2, rate="together")

    def shard(mailbox: VirtualMailbox, step: int) -> Any:
        """Answers a greeting with a step, and tells what the greeting said."""
        init = mailbox.receive(Tag.INIT)
        hello = mailbox.receive(Tag.HELLO)
        header = {"run": init.header["run"], "version": 0, "step": step, "stop": False}
        mailbox.send(0, Tag.WELCOME, header, init.tensors)
        mailbox.receive(Tag.END)
        return hello.header["step"]

    def program(group: AbstractGroup) -> Any:
        mailbox = VirtualMailbox(group)
        if group.rank:
            found = shard(mailbox, 7 if group.rank == 1 else 6)
        else:
            session = Session(mailbox, settings, (0,))
            session.join(State(make_parameters(), {}, torch.zeros(0)))
            for link in session.links:
                link.tell(Tag.END, {"run": session.run})
            found = session.step
        mailbox.close()
        return found

    assert run_virtual(program, 3, timeout=1e6).results == (7, None, 7)
