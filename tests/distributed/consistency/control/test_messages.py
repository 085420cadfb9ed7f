"""Headers that are checked by the types of a dataclass before they are believed."""

import math
from dataclasses import dataclass
from typing import Any

import pytest

from weft.distributed.consistency.control import MalformedError, read_header, read_int, read_ints


@dataclass(frozen=True)
class Header:
    step: int
    lr: float
    name: str
    is_last: bool
    limit: float | None
    pieces: tuple[int, ...]
    pairs: tuple[tuple[int, str], ...]


RIGHT = {"step": 3, "lr": 1, "name": "w", "is_last": False, "limit": None, "pieces": [0, 2], "pairs": [[1, "a"]]}


def test_a_header_is_read_as_its_dataclass() -> None:
    assert read_header(Header, RIGHT) == Header(3, 1.0, "w", False, None, (0, 2), ((1, "a"),))
    assert read_header(Header, {**RIGHT, "limit": 0.5, "more": 1}).limit == 0.5


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": -1},
        {"step": True},
        {"step": 1.0},
        {"step": "1"},
        {"step": None},
        {"lr": math.nan},
        {"lr": math.inf},
        {"lr": -0.5},
        {"lr": True},
        {"name": 3},
        {"is_last": 0},
        {"limit": "none"},
        {"pieces": 3},
        {"pieces": [0, -1]},
        {"pieces": [0.5]},
        {"pairs": [[1]]},
        {"pairs": [[1, "a", 2]]},
        {"pairs": [["a", 1]]},
    ],
)
def test_what_is_of_another_type_is_malformed(wrong: dict[str, Any]) -> None:
    with pytest.raises(MalformedError, match=next(iter(wrong))):
        read_header(Header, {**RIGHT, **wrong})


def test_single_numbers_are_read_by_their_names() -> None:
    assert read_int({"run": 4}, "run") == 4 and read_ints({"counts": [1, 0]}, "counts") == (1, 0)
    for header in ({}, {"run": -1}, {"run": [1]}):
        with pytest.raises(MalformedError):
            read_int(header, "run")
