"""Means and sums of values over a group, in rank order, so that the bits are the same on every rank and in every run.

Numbers travel with the outline of a value, in double precision, and so does a tensor that is one; other tensors follow:

    rank 0   [8.0, 0.25]       weight, outline
    rank 1   [0.0, null]       has nothing to say
"""

import functools
import json
import operator
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from weft.distributed.group.group import AbstractGroup
from weft.distributed.script.calls.carrying import gather_bytes
from weft.distributed.script.calls.trees import Outline, as_json, leaves_of, outline_of, walk
from weft.errors import UsageError

__all__ = ["Kind", "combine"]

CHUNK = 1 << 16
"""Elements of a tensor that are gathered at a time: memory does not grow with its size times ranks."""

Kind = Literal["mean", "sum"]


def combine(group: AbstractGroup, kind: Kind, value: Any, weight: float) -> Any:
    """The weighted mean, or the sum, of the ranks that have a value and a weight. A collective call."""
    outline, tensors = outline_of(_with_numbers(value))
    notes = [json.loads(text) for text in gather_bytes(group, as_json([weight, outline]))]
    weights = {rank: its for rank, (its, given) in enumerate(notes) if its and given is not None}
    form = _check_alike(kind, {rank: notes[rank][1] for rank in weights})
    columns = zip(*(leaves_of(notes[rank][1]) for rank in weights), strict=True)
    left = iter(tensors if group.rank in weights else ())
    results = iter([_reduce(group, kind, column, weights, left) for column in columns])
    total = walk(form, lambda _: next(results))
    return _as_given(total, value, kind) if _form(outline) == _form(form) else total


def _reduce(
    group: AbstractGroup, kind: Kind, column: tuple[Outline, ...], weights: dict[int, float], own: Iterator[Tensor]
) -> Any:
    """One leaf, of the ranks that have one, in rank order. All ranks take part where it is a tensor."""
    match column[0]:
        case [str(_), str(name), list(shape)]:
            dtype = getattr(torch, name)
            given = next(own, None)
            flat = torch.zeros(shape, dtype=dtype) if given is None else given.detach().cpu().contiguous()
            total = [_reduce_chunk(group, kind, part, weights) for part in flat.view(-1).split(CHUNK)]
            return torch.cat(total).to(_result_type(dtype, kind)).view(shape)
        case _:
            return _add(kind, list(column), list(weights.values()))


def _reduce_chunk(group: AbstractGroup, kind: Kind, part: Tensor, weights: dict[int, float]) -> Tensor:
    table = torch.empty(group.size, len(part), dtype=part.dtype)
    if len(part):
        group.all_gather(table, part.unsqueeze(0))
    wide = _wide_type(_result_type(part.dtype, kind))
    total: Tensor = _add(kind, [table[rank].to(wide) for rank in weights], list(weights.values()))
    return total


def _add(kind: Kind, terms: list[Any], weights: list[float]) -> Any:
    """Numbers or tensors, ((x0 + x1) + x2) + ..., which are rounded on the way but for whole numbers."""
    if kind == "sum":
        return functools.reduce(operator.add, [+term for term in terms])  # of a bool, a number
    if len(terms) == 1:  # to multiply and divide would round it
        return terms[0] * 1.0
    scaled = [term * weight for term, weight in zip(terms, weights, strict=True)]
    return functools.reduce(operator.add, scaled) / functools.reduce(operator.add, weights)


def _check_alike(kind: Kind, outlines: dict[int, Outline]) -> Outline:
    """The outline of the first rank, if those of the others have the same containers, names, shapes and types."""
    if not outlines:
        raise UsageError(
            f"no rank has anything to say (weft.{kind}); let one of them give a value, with a weight above 0"
        )
    first = next(iter(outlines))
    for leaf in leaves_of(outlines[first]):
        if leaf is None or isinstance(leaf, str):
            raise UsageError(f"there is no {kind} of this (value: {leaf!r}); give numbers and tensors")
    forms = {rank: _form(outline) for rank, outline in outlines.items()}
    for rank, form in forms.items():
        if form != forms[first]:
            raise UsageError(
                f"ranks give values of different forms to weft.{kind} (rank {first}: {forms[first]}, "
                f"rank {rank}: {form}); give the same on all"
            )
    return outlines[first]


def _form(outline: Outline) -> Any:
    return walk(outline, lambda leaf: leaf if isinstance(leaf, list) else "text" if isinstance(leaf, str) else "number")


def _is_number(tensor: Tensor) -> bool:
    return tensor.dim() == 0 and not tensor.is_complex()


def _with_numbers(value: Any) -> Any:
    """Tensors that are one number as such: a rank that added nothing to a total of 0 may meet others' tensors."""
    match value:
        case dict():
            return {key: _with_numbers(item) for key, item in value.items()}
        case list():
            return [_with_numbers(item) for item in value]
        case tuple() if not hasattr(value, "_fields"):
            return tuple(_with_numbers(item) for item in value)
        case _:
            return value.item() if isinstance(value, Tensor) and _is_number(value) else value


def _as_given(result: Any, value: Any, kind: Kind) -> Any:
    """The result, with tensors on the devices of those that this rank gave, and numbers in tensors where it did so."""
    match value:
        case dict():
            return {key: _as_given(result[key], item, kind) for key, item in value.items()}
        case list() | tuple():
            return type(value)(_as_given(its, item, kind) for its, item in zip(result, value, strict=True))
        case Tensor() if _is_number(value):
            return torch.tensor(result, dtype=_result_type(value.dtype, kind), device=value.device)
        case Tensor():
            return result.to(value.device)
        case np.ndarray():
            return result.numpy()
        case _:
            return result


def _result_type(dtype: torch.dtype, kind: Kind) -> torch.dtype:
    """As torch's own sum and mean have it, but for a mean of whole numbers, which torch refuses."""
    if dtype.is_floating_point or dtype.is_complex:
        return dtype
    return torch.int64 if kind == "sum" else torch.get_default_dtype()


def _wide_type(result: torch.dtype) -> torch.dtype:
    return torch.complex128 if result.is_complex else torch.float64 if result.is_floating_point else torch.int64
