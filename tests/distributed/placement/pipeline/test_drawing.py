"""Schedules drawn: a row for each stage, passes as long as they take, chunks as letters."""

from weft.distributed.placement.pipeline.drawing import draw, legend
from weft.distributed.placement.pipeline.schedules import gpipe, interleaved
from weft.specs.plan import Choice


def test_passes_are_as_long_as_they_take() -> None:
    assert draw(gpipe(2, Choice("gpipe", (("micro", 2),)))) == [
        "stage 0  0 1       0---1---",
        "stage 1    0 1 0---1---",
    ]


def test_chunks_are_letters_and_numbers_have_room() -> None:
    schedule = interleaved(2, Choice("interleaved", (("micro", 12), ("chunks", 2))))
    first, second = draw(schedule)
    assert first.startswith("stage 0  0a  1a  0b  1b  2a") and second.startswith("stage 1      0a  1a  0b")
    assert "11b-----" in first and "a letter is a chunk" in legend(schedule)[0]
    assert legend(schedule)[2] == "in flight: 5, 3 chunks of micro-batches"
