"""Lazy layers sized from shapes: a model is built as if every size had been written down.

Two builds. The first has no values: everything is on the `meta` device, and a forward pass of shapes alone tells what
reaches each lazy layer. The second is real, and gives each lazy layer its size at the moment when it is constructed:

    build()    Linear   LazyLinear   Conv2d   LazyLinear        random numbers are drawn in this order,
    draws        1          2          3          4             as by the same model without lazy layers

PyTorch by itself would draw for lazy layers when they first run, after all others, so that the same seed gave another
model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from weft.errors import GraphError
from weft.specs import TensorSpec
from weft.torch_private import settle_lazy

__all__ = ["build_sized"]

Reached = tuple[tuple[Any, ...], Mapping[str, Any]]
"""The arguments of a call of a layer: tensors without values."""


_CHANGED = "build made other lazy layers the second time; let it do the same both times"


def build_sized(build: Callable[[], nn.Module], *inputs: Tensor | TensorSpec) -> nn.Module:
    """Build a module, with every lazy layer (`nn.LazyLinear` and its like) sized by what reaches it.

    Random numbers are drawn as by the same module with sizes given: for the same seed it has the same initial values.

    Args:
        build: makes the module; called twice, so it must do the same both times.
        inputs: what the module will be called with; of a tensor, shape and type count. A batch of 2 will do.

    Raises:
        GraphError: a lazy layer that nothing reaches, or a forward pass that needs values.

    >>> module = build_sized(lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), torch.ones(2, 4, 5))
    >>> module[1]
    Linear(in_features=20, out_features=3, bias=True)
    """
    first: list[nn.Module] = []
    with _use_watch(first.append), torch.device("meta"):
        shapes = build()
    reached = _what_reaches(first, shapes, [_without_values(given) for given in inputs])
    waiting = iter(zip(first, reached, strict=True))

    def settle(layer: nn.Module) -> None:
        before, (args, kwargs) = next(waiting, (None, ((), {})))
        if type(before) not in (type(layer), getattr(layer, "cls_to_become", None)):
            raise GraphError(_CHANGED)
        settle_lazy(layer, args, kwargs)

    with _use_watch(settle):
        module = build()
    if next(waiting, None) is not None:
        raise GraphError(_CHANGED)
    return module


def _what_reaches(layers: Sequence[nn.Module], module: nn.Module, inputs: Sequence[Tensor]) -> list[Reached]:
    seen: dict[nn.Module, Reached] = {}

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.setdefault(layer, (args, kwargs))

    hooks = [layer.register_forward_pre_hook(note, prepend=True, with_kwargs=True) for layer in layers]
    try:
        with torch.no_grad(), torch.device("meta"):
            module(*inputs)
    except (NotImplementedError, RuntimeError) as error:
        raise GraphError(f"sizes cannot be had from a forward pass without values ({error})") from error
    for hook in hooks:
        hook.remove()
    names = {layer: name for name, layer in module.named_modules()}
    missed = [names.get(layer, "not part of the module") for layer in layers if layer not in seen]
    if missed:
        raise GraphError(f"nothing reaches a lazy layer ({', '.join(missed)}); give it its size")
    return [seen[layer] for layer in layers]


@contextmanager
def _use_watch(built: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call `built` with every lazy layer as soon as it is constructed."""
    originals = {cls: cls.__dict__["__init__"] for cls in _lazy_classes(LazyModuleMixin)}
    under_construction: set[int] = set()

    def watching(original: Callable[..., None]) -> Callable[..., None]:
        def construct(self: Any, *args: Any, **kwargs: Any) -> None:
            is_outermost = id(self) not in under_construction  # a constructor calls those of its bases
            under_construction.add(id(self))
            original(self, *args, **kwargs)
            if is_outermost:
                under_construction.remove(id(self))
                built(self)

        return construct

    try:
        for cls, original in originals.items():
            cls.__init__ = watching(original)
        yield
    finally:
        for cls, original in originals.items():
            cls.__init__ = original


def _lazy_classes(cls: Any) -> Iterator[Any]:
    """The class and those that derive from it, as far as they have a constructor of their own."""
    if "__init__" in cls.__dict__:
        yield cls
    for derived in cls.__subclasses__():
        yield from _lazy_classes(derived)


def _without_values(given: Tensor | TensorSpec) -> Tensor:
    return torch.empty(tuple(given.shape), dtype=given.dtype, device="meta")
