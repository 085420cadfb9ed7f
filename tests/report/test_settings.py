"""Settings go by the keys that `--set` takes, and what differs between two runs is named by them."""

from collections.abc import Callable

from weft.records.record import RunRecord
from weft.report.settings import SettingDifference, differences, settings_of


def test_settings_are_flat_and_readable(make_record: Callable[..., RunRecord]) -> None:
    record = make_record()
    fixed = {"model": "mlp", "model.hidden": "64,32", "epochs": "4", "target": "accuracy 0.97"}
    assert settings_of(record, "fixed") == fixed
    assert settings_of(record, "mutable") == {
        "batch_size": "32",
        "optimizer": "adam",
        "optimizer.lr": "0.01",
        "clip_norm": "none",
    }


def test_same_settings_do_not_differ(make_record: Callable[..., RunRecord]) -> None:
    assert differences(make_record(), make_record()) == []


def test_fixed_part_comes_first(make_record: Callable[..., RunRecord]) -> None:
    found = differences(make_record(lr=0.01, epochs=4), make_record(lr=0.1, epochs=8))
    assert found == [
        SettingDifference("fixed", "epochs", "4", "8"),
        SettingDifference("mutable", "optimizer.lr", "0.01", "0.1"),
    ]


def test_setting_that_one_run_lacks_is_a_difference(
    make_record: Callable[..., RunRecord], measured_record: RunRecord
) -> None:
    assert differences(make_record(), measured_record)[0] == SettingDifference("fixed", "model", "mlp", "-")
