"""The calls of a forward pass, found by running it once: for models that torch.fx cannot trace.

tensors     known by identity: what a call returned is the argument of the next
sizes       numbers that remember which call they came from, and what was computed of them
decisions   on sizes and settings are taken as in the run; one on the values of a tensor is refused
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.distributed.placement.pipeline.partition_calls import (
    Attribute,
    Call,
    Capture,
    Value,
    attributes_of,
    map_structure,
    values_of,
)
from weft.distributed.placement.pipeline.stages import INPUT
from weft.errors import GraphError
from weft.torch_private import use_compiling

__all__ = ["Inputs", "record", "run_on", "tensors_of"]

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device)
_DECIDING = frozenset({"__bool__", "item", "tolist", "__int__", "__float__", "__index__", "equal", "allclose"})


Inputs = tuple[Tensor, ...] | Mapping[str, Tensor]
"""Of a forward pass, by position or by name; numbered in their order."""


def run_on(module: nn.Module, inputs: Inputs) -> Any:
    return module(**inputs) if isinstance(inputs, Mapping) else module(*inputs)


def tensors_of(inputs: Inputs) -> tuple[Tensor, ...]:
    return tuple(inputs.values()) if isinstance(inputs, Mapping) else inputs


def record(module: nn.Module, inputs: Inputs, blocks: Mapping[str, nn.Module]) -> Capture:
    """The calls of `module(*inputs)` in its present mode, whose state and random numbers are the caller's to restore.

    Raises:
        GraphError: a decision hangs on the values of a tensor, or a block takes an object that no stage can be sent.
    """
    try:
        return _record(module, inputs, blocks)
    except _DecisionError:
        with use_compiling():
            return _record(module, inputs, blocks)


class _DecisionError(GraphError):
    """A decision by the values of a tensor."""


def _record(module: nn.Module, inputs: Inputs, blocks: Mapping[str, nn.Module]) -> Capture:
    recorder = _Recorder(module, tensors_of(inputs))
    with ExitStack() as opened:
        for path, block in blocks.items():
            opened.enter_context(_use_forward(block, recorder.forward_of(path, block)))
        opened.enter_context(torch.no_grad())
        opened.enter_context(recorder)
        result = run_on(module, inputs)
    output = map_structure(recorder.reference, result)
    return Capture(tuple(recorder.calls), output, frozenset(recorder.numbers), recorder.num_bytes)


@contextmanager
def _use_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    before = module.__dict__.get("forward")
    object.__setattr__(module, "forward", forward)
    try:
        yield
    finally:
        if before is None:
            object.__delattr__(module, "forward")
        else:
            object.__setattr__(module, "forward", before)


@final
class _Recorder(TorchFunctionMode):
    def __init__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.numbers: set[str] = set()
        self.num_bytes: dict[str, int] = {}
        self._is_inside = False  # a block, whose own calls are not recorded
        self._of_sizes: set[str] = set()  # values that hang on sizes alone
        self._kept: list[Any] = []  # as long as their identities mean something
        self._references: dict[int, Value | Attribute] = {}
        for name, tensor in (*module.named_buffers(), *module.named_parameters()):
            self._references[id(tensor)] = Attribute(name)
        for number, tensor in enumerate(inputs):
            self._references[id(tensor)] = Value(f"{INPUT}{number}")

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_inside:
            return func(*args, **kwargs)
        result = func(*map_structure(_plain, args), **map_structure(_plain, dict(kwargs)))
        name = getattr(func, "__name__", "")
        with self._use_silence():
            if name in _DECIDING and not all(map(self._is_of_sizes, args)):
                raise _DecisionError(_text_of_decision(name))
            if _writes(name, args):
                return self._note_write(func, args, kwargs, result)
            return self._note(func, args, kwargs, result)

    @contextmanager
    def _use_silence(self) -> Iterator[None]:
        """Calls in the block are not recorded."""
        was_inside, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = was_inside

    def forward_of(self, path: str, block: nn.Module) -> Callable[..., Any]:
        """In place of a block's own: runs it, and notes the call."""
        forward = block.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            plain = map_structure(_plain, args), map_structure(_plain, kwargs)
            if self._is_inside:
                return forward(*plain[0], **plain[1])
            with self._use_silence():
                result = forward(*plain[0], **plain[1])
                return self._note(path, args, kwargs, result)

        return run

    def compute(self, function: Callable[..., Any], *args: Any) -> Any:
        """With sizes."""
        result = function(*map(_plain, args))
        return result if self._is_inside else self._note(function, args, {}, result)

    def reference(self, leaf: Any, taker: str = "output") -> Any:
        """An argument as a call remembers it."""
        if isinstance(leaf, _Size):
            return leaf.value if leaf.recorder is self else int(leaf)
        if isinstance(leaf, Tensor):
            self._kept.append(leaf)
            return self._references.get(id(leaf), leaf)
        if isinstance(leaf, _CONSTANTS) or callable(leaf):
            return leaf
        what = f"{taker} has a {type(leaf).__name__}"
        raise GraphError(
            f"only tensors and constants can go between stages ({what}); switch it off, as use_cache=False"
        )

    def _note(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
        """Remember a call that gave tensors or sizes; what it gave, with sizes that remember it."""
        outputs: list[str] = []

        def keep(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor | int) or isinstance(leaf, bool):
                return leaf
            value = Value(f"value/{len(self.calls)}/{len(outputs)}")
            outputs.append(value.id)
            if isinstance(leaf, Tensor):
                self._name(leaf, value)
                return leaf
            self.numbers.add(value.id)
            return _Size(leaf, value, self)

        name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        arguments = self._arguments(name, args, kwargs)
        if isinstance(result, torch.Size):
            noted: Any = torch.Size([keep(size) for size in result])
        elif isinstance(result, Tensor) and isinstance(self._references.get(id(result)), Attribute):
            return result  # as `weight.to(dtype)` does where there is nothing to do: it stays the parameter
        else:
            noted = map_structure(keep, result)
        if outputs:
            self.calls.append(Call(target, arguments, tuple(outputs)))
            if not isinstance(target, str) and self._hangs_on_sizes(arguments):
                self._of_sizes.update(outputs)
        return noted

    def _hangs_on_sizes(self, arguments: Any) -> bool:
        known = self.numbers | self._of_sizes
        return not attributes_of(arguments) and all(value in known for value in values_of(arguments))

    def _is_of_sizes(self, argument: Any) -> bool:
        if not isinstance(argument, Tensor):
            return True
        reference = self._references.get(id(argument))
        return reference is None or (isinstance(reference, Value) and reference.id in self._of_sizes)

    def _note_write(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
        target = self._references.get(id(args[0]))
        is_input = isinstance(target, Value) and target.id.startswith(INPUT)
        if is_input or isinstance(target, Attribute) or args[0]._is_view():
            what = f"{func.__name__} on an input, a parameter, a buffer or a view"
            raise GraphError(f"forward writes in place what several stages may read ({what}); compute a new tensor")
        arguments = self._arguments(func.__name__, args, kwargs)
        value = Value(f"value/{len(self.calls)}/0")
        self.calls.append(Call(func, arguments, (value.id,), writes=True))
        if self._hangs_on_sizes(arguments):
            self._of_sizes.add(value.id)
        self._name(args[0], value)
        return result

    def _arguments(self, name: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        found: tuple[tuple[Any, ...], dict[str, Any]] = map_structure(
            lambda leaf: self.reference(leaf, name), (tuple(args), dict(kwargs))
        )
        return found

    def _name(self, tensor: Tensor, value: Value) -> None:
        self._kept.append(tensor)
        self._references[id(tensor)] = value
        self.num_bytes[value.id] = tensor.nbytes


def _text_of_decision(name: str) -> str:
    what = f"Tensor.{name.strip('_')} outside of a block"
    return f"forward decides by the values of a tensor, which no cut can follow ({what}); decide inside a block"


def _writes(name: str, args: tuple[Any, ...]) -> bool:
    if not args or not isinstance(args[0], Tensor):
        return False
    return name in ("__setitem__", "__iadd__", "__imul__") or (name.endswith("_") and not name.endswith("__"))


def _plain(leaf: Any) -> Any:
    return int(leaf) if isinstance(leaf, _Size) else leaf


@final
class _Size(int):
    """A whole number that remembers where it came from."""

    value: Value
    recorder: "_Recorder"

    def __new__(cls, number: int, value: Value, recorder: "_Recorder") -> Self:
        self = super().__new__(cls, number)
        self.value, self.recorder = value, recorder
        return self

    def __neg__(self) -> Any:
        return self.recorder.compute(operator.neg, self)


def _operation(function: Callable[..., Any], *, is_reflected: bool) -> Callable[[_Size, Any], Any]:
    def operate(self: _Size, other: Any) -> Any:
        if not isinstance(other, int):
            return function(other, int(self)) if is_reflected else function(int(self), other)
        return self.recorder.compute(function, *((other, self) if is_reflected else (self, other)))

    return operate


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    setattr(_Size, f"__{_name}__", _operation(getattr(operator, _name), is_reflected=False))
    setattr(_Size, f"__r{_name}__", _operation(getattr(operator, _name), is_reflected=True))
