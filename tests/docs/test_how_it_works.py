"""docs/how_it_works.py: it tells its story, uses nothing of Weft, and its proof can fail."""

import ast
import importlib.util
import re
import subprocess
import sys
from functools import partial
from types import ModuleType

import pytest
import torch

from tests.docs.documents import ROOT

FILE = ROOT / "docs" / "how_it_works.py"


@pytest.fixture(scope="module")
def story() -> ModuleType:
    spec = importlib.util.spec_from_file_location("how_it_works", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_it_runs_as_a_script() -> None:
    command = [sys.executable, "-W", "error", str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    verdicts = re.findall(r"^   (PASS|FAIL): .*?(, to the last bit)?$", done.stdout, re.MULTILINE)
    assert verdicts == [("PASS", ", to the last bit"), ("PASS", ""), *[("FAIL", "")] * 3]


def test_it_uses_nothing_of_weft_and_can_be_read_at_one_sitting() -> None:
    text = FILE.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} == {"collections", "functools", "torch"}
    assert 150 <= len(text.splitlines()) <= 250


def test_where_to_read_on_exists() -> None:
    assert [path for path in re.findall(r"weft/[\w/]+\.py", FILE.read_text()) if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_the_ring_sums_and_sends_what_it_says(story: ModuleType, size: int) -> None:
    vectors = [torch.arange(20.0) * (rank + 1) for rank in range(size)]
    expected = torch.arange(20.0) * sum(range(1, size + 1))
    bytes_sent = story.ring_all_reduce(vectors)
    assert all(torch.equal(vector, expected) for vector in vectors)
    if 20 % size == 0:
        assert bytes_sent == 2 * (size - 1) * 80 // size


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_replicas_are_one_rank_to_the_last_bit(story: ModuleType, size: int) -> None:
    assert story.prove(story.make_batches(), story.start_replicas(size)).endswith("to the last bit")


def test_every_planted_fault_is_caught(story: ModuleType) -> None:
    batches, step = story.make_batches(), story.step_together
    faults = [
        story.prove(batches, story.start_replicas(3), step=partial(step, weigh=story.plain_average)),
        story.prove(batches, story.start_replicas(3), step=partial(step, exchange=story.lossy_ring)),
        story.prove(batches, story.start_replicas(3), step=partial(step, exchange=lambda vectors: None)),
        story.prove(batches, story.start_replicas(3, broadcast=False)),
    ]
    assert all(finding.startswith("FAIL: after step 1") for finding in faults)
