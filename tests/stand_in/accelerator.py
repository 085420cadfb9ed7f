"""A stand-in accelerator: a device of its own kind, `standin:0`, on a machine that has none.

    StandInTensor      what torch and Weft see: device standin:0, no memory that anybody could read
      held             what it computes with: a tensor of the CPU, known to this file alone

Every operator is computed on the CPU, with its bits, and refuses a CPU tensor beside its own, numbers of no dimensions
aside, as CUDA does. It has a generator of its own. Registration is for the whole process and cannot be taken back: only
processes that are there for it call `register`, or find it by the entry point beside this file, as torch finds
accelerators that are installed.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "standin"

aten = torch.ops.aten

# What moves tensors between the two sides, and so may see both.
CROSSINGS = {aten.copy_.default, aten._foreach_copy_.default}
RANDOM = torch.Tag.nondeterministic_seeded


class WrongSideError(RuntimeError):
    """An operator met tensors of both sides."""


class StandInTensor(Tensor):
    """A tensor of the stand-in accelerator. Views of one share what they hold."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "StandInTensor":
        made: StandInTensor = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )
        made.held = held
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StandInTensor({self.held!r})"

    def tolist(self) -> Any:
        """Works on every real device; torch refuses it to classes like this one."""
        return self.held.tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _compute(operator, args, kwargs or {})


def _compute(operator: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on what the tensors hold; its results are of this device, unless it was asked for another."""
    device = kwargs.get("device")
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if operator not in CROSSINGS:
        _check_side(operator, leaves)
    given = {**kwargs, "device": torch.device("cpu")} if device is not None else kwargs
    held_args, held_kwargs = pytree.tree_map_only(StandInTensor, lambda tensor: tensor.held, (args, given))
    own = [tensor for tensor in leaves if isinstance(tensor, StandInTensor)]
    with _use_own_generator(RANDOM in operator.tags):
        result = operator(*held_args, **held_kwargs)
    if operator is aten.copy_.default:  # into the CPU, perhaps
        return args[0]
    if operator is aten._to_copy.default and device is not None and torch.device(device).type != NAME:
        return result
    return pytree.tree_map_only(Tensor, lambda tensor: _wrap(tensor, own), result)


def _wrap(held: Tensor, given: list[StandInTensor]) -> StandInTensor:
    """One of the tensors that an operator was given, where it wrote there; a new one shares memory where that one's
    does, for torch and Weft ask whether memory is shared."""
    written = next((tensor for tensor in given if tensor.held is held), None)
    if written is not None:
        return written
    made, at = StandInTensor(held), held.untyped_storage().data_ptr()
    viewed = next((tensor for tensor in given if at and tensor.held.untyped_storage().data_ptr() == at), None)
    if viewed is not None:
        torch._functionalize_unsafe_set(made, viewed)
    return made


def _check_side(operator: Any, tensors: list[Tensor]) -> None:
    """A number of the CPU may be read, but not written."""
    writes = operator._schema.is_mutable
    strangers = [
        tensor
        for place, tensor in enumerate(tensors)
        if not isinstance(tensor, StandInTensor) and (tensor.dim() > 0 or (writes and place == 0))
    ]
    if strangers:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in strangers)
        raise WrongSideError(f"{operator} met a CPU tensor beside its own (shapes: {shapes})")


# The generator.


class _Generator:
    state = torch.Generator().manual_seed(0).get_state()


@contextmanager
def _use_own_generator(is_random: bool) -> Iterator[None]:
    """Let the CPU draw from the state of this device, and leave its own as it is."""
    if not is_random:
        yield
        return
    before = torch.get_rng_state()
    torch.set_rng_state(_Generator.state)
    try:
        yield
    finally:
        _Generator.state = torch.get_rng_state()
        torch.set_rng_state(before)


class StandInModule(_DummyBackendModule):
    """`torch.standin`: what torch asks of the module of a device."""

    def get_rng_state(self, device: Any = None) -> Tensor:
        return _Generator.state.clone()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        _Generator.state = state.clone()

    def manual_seed_all(self, seed: int) -> None:
        self.manual_seed(seed)

    def manual_seed(self, seed: int) -> None:
        _Generator.state = torch.Generator().manual_seed(seed).get_state()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def set_device(self, device: Any) -> None:
        pass


num_synchronised = 0


def _synchronize(device: Any = None, /) -> None:
    global num_synchronised
    num_synchronised += 1


# New tensors that come of none.


def _empty(
    size: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None, **_: Any
) -> Tensor:
    return StandInTensor(torch.empty(size, dtype=dtype))


def _empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> Tensor:
    return StandInTensor(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Reached by what hides Python from dispatch, such as torch.tensor()."""
    held = [tensor.held if isinstance(tensor, StandInTensor) else tensor for tensor in (source, target)]
    held[1].copy_(held[0])
    return target


@functools.cache
def register() -> None:
    """Make the device known to torch, in this process and for good."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=StandInModule())
    # A device guard in Python cannot do it, and torch.accelerator has nobody else to ask.
    torch.accelerator.synchronize = _synchronize
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    _kept.append(library)


_kept: list[Any] = []
