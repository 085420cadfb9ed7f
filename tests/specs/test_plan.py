"""The plan's text form and its table of refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import PlanError
from weft.specs.plan import AXES, DEGREES, REFUSALS, Choice, Plan, check_plan, parse_plan


def available(axis: str) -> list[str]:
    return [name for name, value in AXES[axis].items() if value.is_available]


@given(
    data=st.sampled_from([2, 4, 8, 16]),
    topology=st.sampled_from(available("topology")),
    consistency=st.sampled_from(available("consistency")),
    compress=st.sampled_from(available("compress")),
)
def test_text_and_plan_are_one(data: int, topology: str, consistency: str, compress: str) -> None:
    plan = parse_plan(f"compress={compress} data={data} topology={topology} consistency={consistency}")
    assert parse_plan(str(plan)) == plan
    assert (plan.data, plan.topology.name, plan.num_ranks) == (data, topology, data)


def test_an_empty_text_is_one_rank() -> None:
    assert parse_plan("") == Plan() == parse_plan("data=1")
    assert str(Plan()) == "data=1"


@pytest.mark.parametrize("text", ["topology=server(2) data=4", "topology=server(shards=2) data=4"])
def test_parameters_by_place_and_by_name(text: str) -> None:
    assert parse_plan(text).topology == Choice("server", (("shards", 2),))


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
        ("topology=server(1,2)", "too many parameters"),
        ("topology=ring(2)", "it takes none"),
        ("topology=server(many)", "wrong type"),
        ("topology=server(0)", "above zero"),
        ("data=2 topology=server(3)", "nearest: data=2 topology=server(shards=2)"),
        ("data=3 topology=hierarchical(2)", "nearest: data=3 topology=ring"),
    ],
)
def test_wrong_texts_are_refused_with_a_cure(text: str, fact: str) -> None:
    with pytest.raises(PlanError, match="(?s)" + fact.replace("(", r"\(").replace(")", r"\)")):
        parse_plan(text)


def test_what_later_versions_bring_is_known_and_refused_as_such() -> None:
    later = [f"{axis}={name}" for axis, values in AXES.items() for name, v in values.items() if not v.is_available]
    later += [f"{degree}=2" for degree, is_available in DEGREES.items() if not is_available]
    assert later
    for text in later:
        with pytest.raises(PlanError, match="not available in this version"):
            parse_plan(text)


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda r: r.reason)
def test_the_nearest_plan_of_every_refusal_is_valid(refusal: object) -> None:
    refused = [
        Plan(data=data, topology=Choice(name, ((key, n),)))
        for data in range(1, 9)
        for n in range(1, 9)
        for name, key in (("server", "shards"), ("hierarchical", "inner"))
    ]
    hits = [plan for plan in refused if refusal.applies(plan)]  # type: ignore[attr-defined]
    assert hits
    for plan in hits:
        check_plan(refusal.cure(plan))  # type: ignore[attr-defined]
