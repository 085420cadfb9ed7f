"""Named sizes: what they print, come to and refuse."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import GraphError
from weft.graph.formats.json_values import decode, encode
from weft.graph.ir.symbolic_sizes import Condition, Size, resolved, sizes_in

BATCH, LENGTH = Size("name", ("batch",)), Size("name", ("length",))

KINDS = st.sampled_from(["add", "mul", "floordiv", "mod", "max", "min"])
SIZES = st.recursive(
    st.sampled_from([BATCH, LENGTH, 1, 2, 3, 7]),
    lambda inner: st.builds(lambda kind, a, b: Size(kind, (a, b)), KINDS, inner, inner),
    max_leaves=8,
).filter(lambda size: isinstance(size, Size))


@settings(deadline=None, max_examples=100)
@given(size=SIZES, batch=st.integers(2, 50), length=st.integers(2, 50))
def test_a_size_is_what_its_text_says_in_python_and_survives_saving(size: Size, batch: int, length: int) -> None:
    sizes = {"batch": batch, "length": length}
    try:
        value = size.value(sizes)
    except ZeroDivisionError:
        return
    assert eval(str(size), {**sizes, "max": max, "min": min}) == value
    assert decode(encode(size), {}) == size


def test_sizes_inside_arguments_are_found_and_replaced() -> None:
    arguments = (1, [BATCH, {"n": Size("mul", (2, LENGTH))}], None)
    assert list(sizes_in(arguments)) == [BATCH, Size("mul", (2, LENGTH))]
    assert resolved(arguments, {"batch": 3, "length": 5}) == (1, [3, {"n": 10}], None)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("pow", (BATCH, 2)),
        ("add", (BATCH,)),
        ("add", (BATCH, "length")),
        ("name", ("lambda",)),
        ("name", ("2x",)),
        ("name", (3,)),
    ],
)
def test_what_is_no_size_is_refused(kind: str, parts: tuple[Size | int | str, ...]) -> None:
    with pytest.raises(GraphError, match="size"):
        Size(kind, parts)


def test_a_condition_holds_or_not_and_a_division_by_zero_does_not() -> None:
    condition = Condition("eq", Size("mod", (LENGTH, Size("add", (BATCH, -2)))), 0)
    assert str(condition) == "length % (batch - 2) == 0"
    assert condition.holds({"batch": 4, "length": 6}) and not condition.holds({"batch": 2, "length": 6})
    with pytest.raises(GraphError, match="not a condition"):
        Condition("approximately", BATCH, 3)
