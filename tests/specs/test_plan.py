"""The plan's text form and its table of refusals."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import PlanError
from weft.specs.axes import AXES
from weft.specs.parsing import parse_plan
from weft.specs.plan import Choice, Plan
from weft.specs.refusal import with_parameters
from weft.specs.refusals import REFUSALS, Refusal, check_plan, nearest_to, refusals_of


def available(axis: str) -> list[str]:
    return [name for name, value in AXES[axis].items() if value.is_available]


def usual_of(axis: str, name: str) -> Choice:
    """The value with all its parameters as they are unless a plan says otherwise."""
    return Choice(name, tuple(AXES[axis][name].parameters.items()))


@given(
    data=st.sampled_from([2, 4, 8, 16]),
    topology=st.sampled_from(available("topology")),
    consistency=st.sampled_from(available("consistency")),
    compress=st.sampled_from(available("compress")),
)
def test_text_and_plan_are_one(data: int, topology: str, consistency: str, compress: str) -> None:
    try:
        plan = parse_plan(f"compress={compress} data={data} topology={topology} consistency={consistency}")
    except PlanError as error:
        plan = parse_plan(str(error).rpartition("nearest: ")[2])
        topology = plan.topology.name
    assert parse_plan(str(plan)) == plan
    assert (plan.data, plan.topology.name, plan.num_ranks) == (data, topology, data)


def test_an_empty_text_is_one_rank() -> None:
    assert parse_plan("") == Plan() == parse_plan("data=1")
    assert str(Plan()) == "data=1"


@pytest.mark.parametrize("text", ["topology=server(2) data=4", "topology=server(shards=2) data=4"])
def test_parameters_by_place_and_by_name(text: str) -> None:
    assert parse_plan(text).topology == Choice("server", (("shards", 2), ("place", "shared"), ("inner", 1)))


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("dta=4", "did you mean 'data'"),
        ("4", "unknown word"),
        ("data=0", "whole number"),
        ("data=two", "whole number"),
        ("data=2 data=4", "given twice"),
        ("topology=rnig", "did you mean 'ring'"),
        ("topology=server(shard=2)", "did you mean 'shards'"),
        ("topology=server(1,own,2,3)", "too many parameters"),
        ("data=4 topology=server(inner=2)", "nearest: data=4 topology=server(shards=1)"),
        ("data=4 consistency=stale topology=server(inner=2)", "joins gradients that are used as they arrive"),
        ("data=4 consistency=elastic topology=server(inner=2)", "joins gradients that are used as they arrive"),
        ("data=4 consistency=async(parts=2) topology=server(inner=2)", "reaches every shard with every push"),
        ("data=2 consistency=async topology=server(inner=3)", "topology=server(shards=1,inner=2)"),
        ("topology=server(1,mine)", "known: own, shared"),
        ("data=2 consistency=async", "nearest: data=2 consistency=async(lr=share) topology=server(shards=1)"),
        ("data=2 consistency=stale(-1) topology=server", "0 or more"),
        ("data=2 consistency=stale(inf) topology=server", r"no rank waits .*nearest: .*bound=inf,commit=arrival"),
        ("data=2 consistency=backup(inf) topology=server", "wrong type"),
        ("data=2 consistency=backup(2) topology=server", "nearest: data=2 consistency=backup(workers=1)"),
        (
            "data=2 consistency=backup(1,deadline=soon) topology=server",
            "nearest: data=2 consistency=backup(workers=1,dea",
        ),
        ("topology=ring(2)", "it takes none"),
        ("topology=server(many)", "wrong type"),
        ("topology=server(0)", "above zero"),
        ("data=2 topology=server(3)", "nearest: data=2 topology=server(shards=2)"),
        ("data=3 topology=hierarchical(2)", "nearest: data=3 topology=ring"),
        ("consistency=local", "nobody to agree with (data=1 consistency=local(steps=8)); nearest: data=1"),
        ("data=2 consistency=local(0)", "above zero"),
        ("data=2 consistency=local(after=-1)", "above zero"),
        ("data=2 consistency=local(outer_lr=nan)", "above zero"),
        ("data=2 consistency=local(state=men)", "did you mean 'mean'"),
        (
            "data=2 consistency=local(outer_lr=0.5)",
            "nearest: data=2 consistency=local(steps=8,outer=nesterov,outer_lr=0.5)",
        ),
        ("data=2 consistency=local(outer=nesterov,outer_momentum=1)", "never settles"),
        ("data=2 consistency=local topology=server", "servers update parameters themselves"),
        ("data=2 consistency=gossip(rign)", "did you mean 'ring'"),
        ("data=2 consistency=gossip topology=ring", "no all-reduce whose algorithm could be chosen"),
        ("data=2 consistency=elastic(beta=2)", "nearest: data=2 consistency=elastic(steps=8)"),
        ("data=2 cut=time", "a model in one stage is not cut.*nearest: data=2$"),
        ("pipeline=2 cut=tiem", "did you mean 'time'"),
        ("pipeline=2 cut=time(stages=fast)", "unknown word in a plan"),
        ("pipeline=2 cut=time(memory=0)", "parameter must be above zero"),
        ("pipeline=2 cut=time(memory=nan)", "parameter must be above zero"),
        (
            "pipeline=2 schedule=pipedream cut=time(measured,4)",
            "several versions of their weights.*nearest: data=1 pipeline=2 schedule=pipedream(sync=own) "
            "cut=time(stages=measured)$",
        ),
    ],
)
def test_wrong_texts_are_refused_with_a_cure(text: str, fact: str) -> None:
    with pytest.raises(PlanError, match="(?s)" + fact.replace("(", r"\(").replace(")", r"\)")):
        parse_plan(text)


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("data=2 consistency=local", "data=2 consistency=local(steps=8)"),
        ("data=2 consistency=local(after = 0, steps = 4)", "data=2 consistency=local(steps=4)"),
        ("data=2 consistency=local(8,mean,100)", "data=2 consistency=local(steps=8,state=mean,after=100)"),
        ("data=2 consistency=gossip(torus,after)", "data=2 consistency=gossip(graph=torus,mix=after)"),
        ("pipeline=2 cut=time", "data=1 pipeline=2 cut=time(stages=equal)"),
        ("pipeline=2 cut=time(measured, inf)", "data=1 pipeline=2 cut=time(stages=measured)"),
        ("pipeline=2 cut=flops(memory=0.5)", "data=1 pipeline=2 cut=flops(stages=equal,memory=0.5)"),
    ],
)
def test_parameters_that_are_as_usual_are_left_out_of_the_text(text: str, short: str) -> None:
    assert str(parse_plan(text)) == short
    assert parse_plan(short) == parse_plan(text)


def test_what_later_versions_bring_is_known_and_refused_as_such() -> None:
    later = [f"{axis}={name}" for axis, values in AXES.items() for name, v in values.items() if not v.is_available]
    assert later
    for text in later:
        with pytest.raises(PlanError, match="not available in this version"):
            parse_plan(text)


def products() -> Iterator[Plan]:
    """Every placement with every value of the other axes, whether it makes sense or not."""
    splits = ("tensor", "pipeline", "shard", "expert", "linear")
    placements = [(one,) for one in splits] + list(combinations(splits, 2))
    others = ("shard_level", "schedule", "cut", "activations", "share", "consistency", "topology", "compress")
    values = [[Choice(name, tuple(AXES[a][name].parameters.items())) for name in available(a)] for a in others]
    pairs = {
        (*usual[:i], one, *usual[i + 1 : j], two, *usual[j + 1 :])
        for usual in [tuple(getattr(Plan(), axis) for axis in others)]
        for i, j in combinations(range(len(others)), 2)
        for one in values[i]
        for two in values[j]
    }
    for placement, data, pair in product(placements, (1, 2), sorted(pairs, key=str)):
        degrees: dict[str, Any] = dict.fromkeys(placement, 2)
        yield replace(Plan(data=data), **degrees, **dict(zip(others, pair, strict=True)))
    host = Choice("server", (("shards", 1), ("place", "shared"), ("inner", 2)))
    gossip = Choice("gossip", (("graph", "ring"), ("mix", "pair"), ("lost", "end")))
    asynchronous = Choice("async", tuple(AXES["consistency"]["async"].parameters.items()))
    yield Plan(data=2, tensor=2, consistency=asynchronous, topology=host)
    yield Plan(data=2, tensor=2, consistency=gossip)
    streamed = Choice("pipedream", tuple(AXES["schedule"]["pipedream"].parameters.items()))
    yield Plan(pipeline=2, schedule=streamed, cut=Choice("flops", (("stages", "measured"), ("memory", 2.0))))


PRODUCTS = list(products())


def test_every_product_makes_sense_or_has_a_nearest_plan_that_does() -> None:
    accepted = 0
    for plan in PRODUCTS:
        try:
            check_plan(plan)
            accepted += 1
        except PlanError as error:
            nearest = parse_plan(str(error).rpartition("nearest: ")[2])
            assert nearest.num_ranks <= plan.num_ranks and parse_plan(str(nearest)) == nearest
    assert 0 < accepted < len(PRODUCTS)


LIMITS = [limit for axis, values in AXES.items() for name in values for limit in refusals_of(axis, Choice(name))]


def applies(refusal: Refusal, plan: Plan) -> bool:
    """A limit of one value's parameters looks for them in every plan."""
    try:
        return refusal.applies(plan)
    except KeyError:
        return False


@pytest.mark.parametrize("refusal", [*REFUSALS, *LIMITS], ids=lambda r: r.reason)
def test_the_nearest_plan_of_every_refusal_is_valid(refusal: Refusal) -> None:
    refused = [
        Plan(data=data, topology=Choice(name, ((key, n),)))
        for data in range(1, 9)
        for n in range(1, 9)
        for name, key in (("server", "shards"), ("hierarchical", "inner"))
    ]
    usual = {name: usual_of("consistency", name) for name in available("consistency")}
    server = Choice("server", (("shards", 1),))
    refused += [
        *(Plan(data=1, consistency=usual[name]) for name in usual),
        *(Plan(data=2, consistency=usual[n], topology=server) for n in usual),
        *(Plan(data=2, shard=2, consistency=usual[n]) for n in ("local", "elastic", "gossip")),
        Plan(data=2, shard=2, topology=server),
        *(Plan(data=2, consistency=usual[n], topology=Choice("ring")) for n in usual),
        *(Plan(data=2, consistency=usual[n], compress=Choice("fp16")) for n in usual),
        *(
            Plan(data=2, compress=with_parameters(usual_of("compress", name), **changed))
            for name in ("topk", "randomk", "dgc", "auto")
            for changed in ({"ratio": 2.0}, {"bits": 3}, {"bits": 4, "sum": "split"})
            if changed.keys() <= AXES["compress"][name].parameters.keys()
        ),
        Plan(data=2, compress=with_parameters(usual_of("compress", "threshold"), value=math.inf)),
        Plan(data=2, expert=2, compress=with_parameters(usual_of("compress", "dgc"), clip=1.0)),
        Plan(data=2, consistency=with_parameters(usual["local"], outer_lr=0.5)),
        Plan(data=2, consistency=with_parameters(usual["local"], outer="nesterov", outer_momentum=1.0)),
        Plan(data=2, consistency=with_parameters(usual["elastic"], beta=2.0)),
        Plan(data=2, consistency=with_parameters(usual["gossip"], mix="after", lost="drop")),
        *(
            Plan(data=2, consistency=with_parameters(usual["gossip"], **changed), compress=Choice(name))
            for changed in ({"mix": "pair"}, {"gamma": 0.5}, {"gamma": 2.0})
            for name in ("sign", "bf16")
        ),
        Plan(data=2, consistency=with_parameters(usual["backup"], workers=2), topology=server),
        Plan(data=2, consistency=with_parameters(usual["backup"], deadline="soon"), topology=server),
        Plan(data=2, consistency=with_parameters(usual["stale"], lr="full"), topology=server),
        Plan(data=2, consistency=with_parameters(usual["stale"], bound=math.inf), topology=server),
        Plan(data=2, topology=with_parameters(server, place="own")),
        Plan(data=4, topology=with_parameters(server, inner=2)),
        Plan(data=2, consistency=usual["async"], topology=with_parameters(server, inner=3)),
        Plan(data=4, consistency=with_parameters(usual["async"], parts=2), topology=with_parameters(server, inner=2)),
        *PRODUCTS,
    ]
    hits = [plan for plan in refused if applies(refusal, plan)]
    assert hits
    for plan in hits:
        check_plan(nearest_to(plan))


def test_zero_is_a_bound_and_a_number_of_backup_workers() -> None:
    assert parse_plan("data=2 consistency=stale(0) topology=server").consistency["bound"] == 0
    endless = "data=2 consistency=stale(bound=inf,commit=arrival) topology=server(shards=1)"
    assert str(parse_plan(endless)) == endless
    assert parse_plan("data=2 consistency=backup(0) topology=server").consistency["workers"] == 0


def test_the_centre_of_elastic_ranks_is_at_servers_or_among_them() -> None:
    assert parse_plan("data=2 consistency=elastic(4) topology=server(1,own)").channel == "servers"
    assert parse_plan("data=2 consistency=elastic(4)").channel == "all_reduce"


def test_servers_of_their_own_are_processes_beside_the_ranks() -> None:
    plan = parse_plan("data=2 consistency=async topology=server(3,own)")
    assert (plan.num_ranks, plan.roles.num_processes) == (2, 5)
    assert plan.roles.names == ("worker", "worker", "server 0", "server 1", "server 2")
    assert parse_plan("data=3").roles.names == ("worker",) * 3


def test_host_servers_come_last_or_share_the_first_worker_of_their_host() -> None:
    own = parse_plan("data=5 consistency=async topology=server(shards=1,place=own,inner=2)")
    assert (own.num_hosts, own.roles.num_processes) == (3, 9)
    assert own.roles.names[5:] == ("server 0", "host server 0", "host server 1", "host server 2")
    shared = parse_plan("data=5 consistency=async topology=server(shards=2,inner=2)")
    assert shared.roles.num_processes == 5 and shared.roles.num_addresses == 10
    assert shared.roles.names[:3] == ("worker, server 0, host server 0", "worker, server 1", "worker, host server 1")
