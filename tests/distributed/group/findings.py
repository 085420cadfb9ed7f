"""The tools of the contract programs: what a rank finds, the values it brings, and the cases it goes through."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from weft.distributed.group import AbstractGroup, Call

Report = dict[str, Any]
Program = Callable[[AbstractGroup], Report]
Runner = Callable[[Callable[[AbstractGroup], Any], int], list[Any]]
"""Runs the program on that many ranks and returns their results in order; None for a rank that died."""

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
LENGTHS = (0, 1, 5, 257)


class Findings:
    """Problems found by one rank, and a digest of the values that all ranks must share."""

    def __init__(self, group: AbstractGroup) -> None:
        self.rank = group.rank
        self.problems: list[str] = []
        self._digest = hashlib.sha256()

    def expect(self, what: str, got: Tensor, wanted: Tensor) -> None:
        if got.shape != wanted.shape or got.dtype != wanted.dtype or not torch.equal(got, wanted):
            self.problems.append(f"rank {self.rank}: {what}: got {got.flatten()[:6]}, wanted {wanted.flatten()[:6]}")

    def expect_close(self, what: str, got: Tensor, wanted: Tensor, tolerance: float) -> None:
        if not torch.allclose(got.double(), wanted.double(), rtol=tolerance, atol=tolerance):
            self.problems.append(f"rank {self.rank}: {what}: got {got.flatten()[:6]}, wanted {wanted.flatten()[:6]}")

    def expect_true(self, what: str, fact: bool) -> None:
        if not fact:
            self.problems.append(f"rank {self.rank}: {what}")

    def share(self, tensor: Tensor) -> None:
        self._digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    def report(self) -> Report:
        return {"problems": self.problems, "digest": self._digest.hexdigest()}


def check_kind(program: Program, run: Runner, size: int) -> None:
    """Raise AssertionError where a kind of group breaks the contract."""
    reports = run(program, size)
    assert len(reports) == size
    problems = [problem for report in reports for problem in report["problems"]]
    assert not problems, "\n".join(problems[:10])
    digests = {report["digest"] for report in reports}
    assert len(digests) == 1, "ranks hold different bits"


def values(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    """Whole numbers -1 to 3: sums over 8 ranks are exact in bfloat16."""
    return ((torch.arange(length) * 7 + rank * 3 + length) % 5 - 1).to(dtype)


def everyone(size: int, length: int, dtype: torch.dtype) -> Tensor:
    return torch.stack([values(rank, length, dtype) for rank in range(size)])


def perform(group: AbstractGroup, call: Call, *, later: bool) -> None:
    """In the asynchronous form, ask and wait twice: both are allowed."""
    work = group.start(call)
    if later:
        work.is_done()
        work.wait()
        assert work.is_done()
    work.wait()


def cases(root: int = 0) -> Iterator[tuple[torch.dtype, int, bool]]:
    """Types, lengths, and whether to use the asynchronous form; few of them for the roots beyond the first."""
    if root > 0:
        yield torch.float32, 5, root % 2 == 0
        return
    for number, dtype in enumerate(DTYPES):
        for length in LENGTHS:
            yield dtype, length, (number + length) % 2 == 0
