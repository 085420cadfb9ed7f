"""Memory of codecs in a run that is cut: with it the run goes on to the same bits, and not without any part of it."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.codecs.test_resume import RECIPE, cut, start
from tests.distributed.virtual_plan import run_plan
from weft.distributed.codecs.codec import AbstractCodec, Kept
from weft.distributed.codecs.dgc import DgcCodec
from weft.distributed.codecs.powersgd import PowerSgdCodec
from weft.distributed.codecs.qsgd import QsgdCodec
from weft.distributed.codecs.signs import SignCodec
from weft.distributed.codecs.topk import TopkCodec
from weft.distributed.realise import RunSpec
from weft.records.record import Repetition
from weft.torch_private import use_determinism
from weft.training import run as run_module
from weft.training.replicas import AbstractReplicas


@pytest.fixture(autouse=True)
def quick_and_determinate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for probe in ("probe_scaling", "probe_step", "probe_data"):
        monkeypatch.setattr(run_module, probe, lambda *_: {})
    with use_determinism():
        yield


def run_with(compress: str) -> Callable[[Callable[[AbstractReplicas], Repetition]], Repetition]:
    plan = f"data=2 topology=direct compress={compress}"

    def run(work: Callable[[AbstractReplicas], Repetition]) -> Repetition:
        found: Repetition = run_plan(plan, lambda _group, r: work(r), spec=RunSpec.of(RECIPE, (0,))).results[0]
        return found

    return run


LOST: list[tuple[str, type[AbstractCodec], str]] = [
    ("topk(0.05)", TopkCodec, "residual/"),
    ("sign", SignCodec, "residual/"),
    ("dgc(0.05,warmup=4)", DgcCodec, "residual/"),
    ("dgc(0.05,warmup=4)", DgcCodec, "velocity/"),
    ("dgc(0.05,warmup=40)", DgcCodec, "messages"),
    ("powersgd(1)", PowerSgdCodec, "residual/"),
    ("powersgd(1)", PowerSgdCodec, "factor/"),
    ("qsgd(4)", QsgdCodec, "messages"),
]


@pytest.mark.parametrize(("compress", "kind", "use"), LOST)
def test_a_run_without_it_has_other_bits(
    compress: str, kind: type[AbstractCodec], use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with(compress)
    whole = start(tmp_path / "whole", run)
    assert cut(tmp_path / "right", run, monkeypatch).hashes == whole.hashes
    memory = kind.memory

    def forgetful(codec: Any) -> Mapping[str, Kept]:
        return {key: kept for key, kept in memory(codec).items() if not key.startswith(use)}

    monkeypatch.setattr(kind, "memory", forgetful)
    assert cut(tmp_path / "wrong", run, monkeypatch).hashes != whole.hashes
