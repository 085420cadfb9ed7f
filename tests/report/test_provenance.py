"""A reader can see how, with what and where a number was made."""

from collections.abc import Callable

from weft.records.record import RunRecord
from weft.report.provenance import provenance_rows


def test_everything_that_is_known_is_told(make_record: Callable[..., RunRecord]) -> None:
    assert provenance_rows(make_record()) == [
        ("fixed", "model=mlp  model.hidden=64,32  epochs=4  target=accuracy 0.97"),
        ("mutable", "batch_size=32  optimizer=adam  optimizer.lr=0.01  clip_norm=none"),
        ("fixed hash", "000000000000"),
        ("data", "0123456789ab"),
        ("created", "2026-01-02T03:04:05+00:00"),
        ("source", "fedcba987654 with changes that are not committed"),
        ("versions", "python 3.11.7, torch 2.13.0"),
        ("machine", "Acme 9, 2 cores, 8.0 GB, 2 threads"),
        ("clock", "never paused"),
    ]


def test_what_is_not_known_is_left_out(measured_record: RunRecord) -> None:
    assert [key for key, _ in provenance_rows(measured_record)] == ["created", "clock"]


def test_data_that_all_repetitions_share_are_told_once(make_record: Callable[..., RunRecord]) -> None:
    assert dict(provenance_rows(make_record(times=[1.0, 2.0])))["data"] == "0123456789ab"
