"""Private names of PyTorch, kept in one file because the pinned version is all that vouches for them."""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_impls import fast_detach
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils.flop_counter import _FlopCounterMode

__all__ = [
    "DataDependentOutputException",
    "DispatchMode",
    "DynamicOutputShapeException",
    "accumulates_in_backward",
    "autograd_numbers",
    "bare",
    "below_autograd",
    "call_for_any_size",
    "compile_with_inductor",
    "expression_of",
    "fake_mode",
    "fake_of",
    "has_own_kernel",
    "hint_of",
    "in_backward",
    "is_transformed",
    "leave_compiler_alone",
    "mode_of",
    "number_of_backward",
    "schema_of",
    "settle_lazy",
    "settle_sizes",
    "shares_memory",
    "size_hints",
    "snapshot",
    "symbolic_mode",
    "use_compiling",
    "use_determinism",
    "use_no_autograd",
    "use_no_modes",
    "would_decompose",
]


@contextmanager
def use_determinism() -> Iterator[None]:
    """Same seed, same bits: refuse operators that cannot promise it, without paying for memory that is filled first.

    The public switch also imports torch's compiler, to configure it; that takes seconds and has no use here.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch._C._get_deterministic_fill_uninitialized_memory()
    torch._C._set_deterministic_algorithms(True)
    torch._C._set_deterministic_fill_uninitialized_memory(False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before[0])
        torch._C._set_deterministic_fill_uninitialized_memory(before[1])


def leave_compiler_alone(mode: type[TorchDispatchMode]) -> type[TorchDispatchMode]:
    """A class decorator. A dispatch mode imports torch's compiler when it first runs, for seconds, only to tell it to
    look away; this one is never traced."""
    dispatch: Any = mode.__dict__["__torch_dispatch__"]
    raw = getattr(dispatch, "__wrapped__", None)
    if raw is not None:
        raw.__dynamo_disable = raw  # where torch keeps what it would have made of it
    return mode


leave_compiler_alone(_FlopCounterMode)
leave_compiler_alone(FakeTensorMode)


def shares_memory(tensor: Tensor) -> bool:
    """Whether anything else holds the tensor's memory: another tensor, or a node of autograd."""
    if tensor.layout is not torch.strided:
        return True
    storage = tensor.untyped_storage()
    # Two holders are ours: the tensor, and the storage object that was just made to ask.
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)


def accumulates_in_backward(node: Any) -> bool:
    """Whether the backward that runs adds to the `grad` of a leaf, of which this is the node; torch.autograd.grad gives
    gradients to its caller instead."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


def is_transformed() -> bool:
    """Whether a transformation of torch.func (vmap, grad), or the compiler, looks at what is called."""
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def fake_mode() -> FakeTensorMode:
    """Where tensors have shapes and no values; `from_tensor` lets one in, a tensor that came another way is refused."""
    return FakeTensorMode(allow_non_fake_inputs=False)


def fake_of(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """The result of `mode.from_tensor`, several times as fast, for a dense tensor whose memory is its own."""
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, like, tensor.device)


def below_autograd(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The operator called in grad mode and yet unseen by autograd: some keep what their backward needs only then."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
            return operator(*args, **kwargs)

    return call


def bare(operator: Any) -> Callable[..., Any]:
    """The operator without the layer of Python around it."""
    function: Callable[..., Any] = operator._op
    return function


def use_no_autograd() -> Any:
    """A context in which no call passes autograd on its way to a kernel."""
    return torch._C._AutoDispatchBelowAutograd()


@cache
def has_own_kernel(operator: Any, device: str) -> bool:
    """Whether an operator is computed by a kernel written for this kind of device, not by way of other operators."""
    key = torch._C._parse_dispatch_key(torch._C._dispatch_key_for_device(device))
    return key is not None and bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key))


def schema_of(target: Any) -> Any:
    """The schema of an operator: arguments, results and writes; None for anything else."""
    return target._schema if isinstance(target, torch._ops.OpOverload) else None


def size_hints(tensor: Tensor) -> Tensor:
    """The tensor itself; or, where a size is symbolic, one without values whose sizes are those of the trace."""
    if all(type(size) is int for size in (*tensor.shape, *tensor.stride())):
        return tensor
    sizes, strides = (list(map(hint_of, part)) for part in (tensor.shape, tensor.stride()))
    return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device="meta")


def autograd_numbers() -> tuple[int | None, int]:
    """Of the call at work: the number of autograd's node whose backward it is part of, and of the last node made, which
    is the call's own if autograd follows it."""
    node = torch._C._current_autograd_node()
    last = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
    return None if node is None else int(node._sequence_nr()), int(last)


def in_backward() -> bool:
    """Whether autograd's backward is what is running."""
    return torch._C._current_autograd_node() is not None


def number_of_backward() -> int:
    """Of the call of backward that is running, each of which has another; below 0 if none is."""
    return int(torch._C._current_graph_task_id())


def snapshot(tensor: Tensor) -> Tensor:
    """The tensor as it is now, without its history; a fake one stays fake."""
    if isinstance(tensor, FakeTensor):
        return fast_detach(tensor.fake_mode, tensor)
    return tensor.detach()


def would_decompose(operator: Any, arguments: Sequence[Any]) -> bool:
    """Whether eager mode would run the operator as several others, and has only been kept from it by inference mode."""
    device = next((value.device.type for value in arguments if isinstance(value, Tensor)), "")
    return _has_only_a_decomposition(operator, device)


@cache
def _has_only_a_decomposition(operator: Any, device: str) -> bool:
    if not isinstance(operator, torch._ops.OpOverload) or not operator._can_decompose():
        return False
    if not device:
        return True
    key = torch._C._parse_dispatch_key(torch._C._dispatch_key_for_device(device))
    return key is not None and not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)


def mode_of(tensors: Iterable[Tensor]) -> FakeTensorMode | None:
    """The mode that the fake ones among these belong to; None if all are real."""
    return next((tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)), None)


@contextmanager
def use_no_modes() -> Iterator[None]:
    """Hide what runs inside from modes that were entered outside."""
    with _disable_current_modes():
        yield


def symbolic_mode(examples: Mapping[str, int], line: Callable[[], str]) -> tuple[FakeTensorMode, dict[str, Any]]:
    """Fake tensors whose sizes may be symbols, and a symbol for each name; `line` says where a size decides something.

    A symbol stands for 2 or more: PyTorch treats sizes of 0 and 1 in their own ways.
    """
    from torch._dynamo.source import ConstantSource  # a fake mode would import it too, for seconds
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    shapes: Any = ShapeEnv()
    shapes.names = {}  # for `expression_of`
    shapes._get_sloc = lambda framework_loc=None: line()  # its own search for the line looks for a compiler at work
    symbols = {}
    for name, example in examples.items():
        source = ConstantSource(name)
        symbol = shapes.create_symbol(example, source, dynamic_dim=DimDynamic.DYNAMIC)
        shapes.names[symbol] = name
        symbols[name] = shapes.create_symintnode(symbol, hint=example, source=source)
    return FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=False), symbols


def call_for_any_size(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An operator on fake tensors, by its shape function in Python: some in C++ would settle on one size."""
    with enable_python_dispatcher():
        return operator(*args, **kwargs)


def settle_sizes(mode: FakeTensorMode) -> list[tuple[Any, Mapping[Any, str], str]]:
    """The assumptions of a trace about its sizes: relation, names of the symbols in it, line. From now on, whoever
    would let a symbolic size decide something gets an error."""
    shapes: Any = mode.shape_env
    shapes.frozen = shapes._error_on_new_guards = True
    return [(guard.expr, shapes.names, str(guard.sloc)) for guard in shapes.guards]


def expression_of(size: Any) -> tuple[Any, Mapping[Any, str]]:
    """The expression of a symbolic size, and the names of the symbols in it."""
    return size.node.expr, size.node.shape_env.names


def hint_of(size: Any) -> int:
    """The size that a symbolic one had in the trace."""
    return size if type(size) is int else int(size.node.hint)


def compile_with_inductor(
    function: Callable[[Sequence[Tensor]], Sequence[Tensor]], likes: Sequence[Tensor]
) -> tuple[Callable[[list[Tensor]], Sequence[Tensor]], str]:
    """A function of tensors like these (values do not matter) as machine code, and the source of it.

    What comes takes a list, which it empties.
    """
    with warnings.catch_warnings(), _use_no_progress_bars():
        warnings.simplefilter("ignore")  # the compiler's modules warn of each other
        try:
            return _compile_with_inductor(function, likes)
        finally:
            os.environ.pop("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", None)  # read while machine code is loaded


@contextmanager
def _use_no_progress_bars() -> Iterator[None]:
    """FX makes a progress bar for every graph that it goes through, which starts a thread even if it is never shown."""
    from torch.hub import tqdm  # type: ignore[attr-defined]

    before = getattr(tqdm, "monitor_interval", None)
    tqdm.monitor_interval = 0
    try:
        yield
    finally:
        tqdm.monitor_interval = before


def _compile_with_inductor(function: Callable[..., Any], likes: Sequence[Tensor]) -> tuple[Callable[..., Any], str]:
    # Here because they take seconds.
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in likes]
    # One compiler at a time, in this process; and no cache of pickles.
    settings = {"compile_threads": 1, "fx_graph_cache": False, "fx_graph_remote_cache": False}
    with torch.no_grad(), mode, tracing(TracingContext(mode)), config.patch(settings):
        module = make_fx(lambda *inputs: tuple(function(inputs)), decomposition_table=select_decomp_table())(*fakes)
        output: Any = module.graph.output_node()
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # whose strides are to be kept
        compiled: Any = compile_fx_inner(module, fakes)
    return compiled.current_callable, compiled.source_code


def settle_lazy(layer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Give a lazy layer the sizes, and the class, that it would take on when called with these."""
    layer._infer_parameters(layer, args, dict(kwargs))


@contextmanager
def use_compiling() -> Iterator[None]:
    """While it is held, code that asks whether it is being compiled, to leave out shortcuts, is told so."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
