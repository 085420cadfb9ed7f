"""Custom operators, from a class with `forward` and `backward`.

It works in eager mode, in captured graphs and under torch.compile:

    class Swish:
        def forward(self, x: Tensor, beta: float = 1.0) -> Tensor:
            return x * torch.sigmoid(beta * x)

        def backward(self, grads, inputs, outputs):
            ...
            return grads[0] * slope, None  # one for each input

    swish = operator(Swish)
    y = swish(x, 2.0)
"""

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, final

import torch
from torch.utils.flop_counter import flop_registry

from weft.errors import UsageError
from weft.operators.aten_cost import register_cost
from weft.operators.cost import Cost, CostFormula
from weft.operators.definition import Definition, read_definition
from weft.operators.gradient import DirectGradient, OpaqueGradient

__all__ = ["Operator", "define", "load_operators", "operator"]

NAMESPACE = "custom"
NAME = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*")

# Name -> where it was defined. A cell of a notebook may be run again; two authors may not take one name.
_origins: dict[str, str] = {}


@final
@dataclass(frozen=True)
class Operator:
    """A registered operator. It holds no state: calls share nothing."""

    name: str
    definition: Definition
    overload: Any  # torch.ops.<namespace>.<name>.default, the node in a graph

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self.overload(*inputs, **options)

    @property
    def argument_names(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.overload._schema.arguments)

    @property
    def is_differentiable(self) -> bool:
        return self.definition.backward is not None

    def samples(self, *, seed: int = 0, for_bench: bool = False) -> Iterator[tuple[Any, ...]]:
        """The inputs to check the operator with, or to time it with; the same for the same seed."""
        source = (for_bench and self.definition.bench_samples) or self.definition.samples
        if not source:
            raise UsageError(f"operator has no inputs to try ({self.name}); write samples(), a list of inputs")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            samples = [tuple(sample) if isinstance(sample, (tuple, list)) else (sample,) for sample in source()]
        if not samples:
            raise UsageError(f"samples() gives no inputs ({self.name}); give at least one")
        yield from map(self.definition.complete, samples)

    def cost(self, *inputs: Any) -> Cost | None:
        """The cost that the definition states, from shapes; None where it states none."""
        return self.definition.cost(*self.definition.complete(inputs)) if self.definition.cost else None


def operator(subject: object, *, name: str | None = None, opaque_backward: bool = False) -> Operator:
    """Register a class (or an object) with `forward` and perhaps `backward`, `infer`, `samples`, `bench_samples`,
    `reference` and `cost`. Also a class decorator.

    Args:
        subject: annotated methods: `forward(*inputs)` gives outputs, `backward(grads, inputs, outputs)` a gradient or
            None for each input, `samples()` inputs to check with.
        name: `namespace::name`; made from the name of the class where none is given.
        opaque_backward: `backward` runs as one operator that nothing looks into. It may then use NumPy or other
            libraries, but has no gradient itself. Without, it must be made of torch's operators, and has one.

    >>> class Double:
    ...     def forward(self, x: torch.Tensor) -> torch.Tensor:
    ...         return 2 * x
    ...
    ...     def backward(self, grads, inputs, outputs):
    ...         return 2 * grads[0]
    >>> double = operator(Double, name="docs::double")
    >>> x = torch.ones(2, requires_grad=True)
    >>> double(x).sum().backward()
    >>> x.grad
    tensor([2., 2.])
    """
    owner = subject if isinstance(subject, type) else type(subject)
    full_name = name or f"{NAMESPACE}::{_snake_case(owner.__name__)}"
    origin = f"{owner.__module__}.{owner.__qualname__}"
    return define(read_definition(subject), name=full_name, origin=origin, opaque_backward=opaque_backward)


def define(definition: Definition, *, name: str, origin: str, opaque_backward: bool) -> Operator:
    """Tell PyTorch of an operator: its schema, its shapes, its gradient, its FLOPs."""
    schema = _read_schema(definition, name)
    _claim(name, origin)
    registered = torch.library.custom_op(name, _on_all_inputs(definition), mutates_args=(), schema=schema)
    registered.register_fake(_shape_inference(definition, name))
    if definition.backward is not None:
        gradient = (
            OpaqueGradient(name, schema, definition.backward, definition.complete)
            if opaque_backward
            else DirectGradient(name, definition.backward)
        )
        registered.register_autograd(gradient.backward, setup_context=gradient.setup_context)
    namespace, _, short_name = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), short_name)
    if definition.cost is not None:
        _register_cost(packet, definition, definition.cost)
    return Operator(name, definition, packet.default)


def load_operators(path: Path) -> list[Operator]:
    """Run a Python file, and return the operators at its top level, in their order.

    Raises:
        UsageError: there is no such file, or no operator in it.
    """
    if not path.is_file():
        raise UsageError(f"no such file ({path}); give the path from the current folder")
    name = f"weft_operators_{path.stem}_{sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"not a Python file ({path}); give one whose name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    found = dict.fromkeys(id(value) for value in vars(module).values() if isinstance(value, Operator))
    operators = [next(v for v in vars(module).values() if id(v) == key) for key in found]
    if not operators:
        raise UsageError(f"no operators in the file ({path}); write name = operator(Class) or cpp_operator(...)")
    return operators


def _claim(name: str, origin: str) -> None:
    if not NAME.fullmatch(name):
        raise UsageError(f"not a name of an operator ({name}); write namespace::name")
    if _origins.setdefault(name, origin) != origin:
        raise UsageError(
            f"two operators of one name (name: {name}, by: {_origins[name]}, and: {origin}); give one of them a name="
        )


def _read_schema(definition: Definition, name: str) -> str:
    try:
        schema = torch.library.infer_schema(definition.signature, mutates_args=())
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"arguments or results of an operator cannot be read (operator: {name}, {error}); annotate each argument "
            "with Tensor, int, float, bool or str, and the result with Tensor or tuple[Tensor, ...]"
        ) from error
    if "Tensor" not in schema.partition("->")[2]:
        raise UsageError(f"an operator gives tensors (operator: {name}, schema: {schema}); annotate the result")
    return schema


def _on_all_inputs(definition: Definition) -> Callable[..., Any]:
    return lambda *inputs: definition.forward(*definition.complete(inputs))


def _shape_inference(definition: Definition, name: str) -> Callable[..., Any]:
    if definition.infer is not None:
        given = definition.infer
        return lambda *inputs: given(*definition.complete(inputs))

    def infer(*inputs: Any) -> Any:
        try:
            return definition.forward(*definition.complete(inputs))
        except Exception as error:
            raise UsageError(
                f"shapes could not be found by running forward without data (operator: {name}, "
                f"{type(error).__name__}: {error}); write infer(*inputs), which gives empty outputs"
            ) from error

    return infer


def _register_cost(packet: Any, definition: Definition, formula: CostFormula) -> None:
    def cost(*inputs: Any) -> Cost:
        return formula(*definition.complete(inputs))

    def flops(*inputs: Any, out_val: Any = None) -> int:
        return cost(*inputs).flops

    flops._get_raw = True  # type: ignore[attr-defined]  # torch's counter is to hand over tensors, not shapes
    register_cost(packet, cost)
    flop_registry[packet] = flops


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
