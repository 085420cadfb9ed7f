"""Models that PyTorch has parallelised already: by DTensors, by FSDP2, or into stages of a pipeline.

    mesh of the script        rank 0   1   2   3         Weft sees            samples        gradients
    (dp=2, tp=2), DTensors    [ a  b ][ a  b ]           data=2 tensor=2      0 0 1 1        averaged over dp
    (dp=4), fully_shard       [ a  b  c  d ]             data=4               0 1 2 3        FSDP's own, over dp
    (pp=2, dp=2), stages      [ a  a ][ b  b ]           pipeline=2 data=2    0 1 0 1        averaged over dp

PyTorch moves activations and parts over its own process groups, whatever their backend. Weft deals out samples and
averages, over a group of its own, the gradients that nobody else does. DTensors and FSDP modules say by themselves how
they lie; a stage of a pipeline is a plain module, so `weave` is told: `mesh=device_mesh["dp"]`.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from weft.distributed.codecs import make_codec
from weft.distributed.place import AbstractPlace
from weft.distributed.placement import DataParallel, MeshGroups
from weft.distributed.script.weaving.dtensors import is_dtensor
from weft.errors import PlanError, UsageError
from weft.specs import Mesh, Plan

__all__ = ["TorchParallel", "find_torch_parallel", "use_torch_parallel"]


@dataclass(frozen=True)
class TorchParallel:
    """How the ranks of a model lie that PyTorch has parallelised.

    Args:
        mesh: as Weft sees them.
        reduced: parameters whose gradients FSDP averages over all ranks with samples of their own, by identity.
        differs: whether ranks have other modules: stages.
    """

    mesh: Mesh
    reduced: frozenset[int] = field(default_factory=frozenset)
    differs: bool = False


def find_torch_parallel(
    models: Sequence[nn.Module], given: Any, plan: Plan, rank: int, size: int
) -> TorchParallel | None:
    """How PyTorch has laid out models; None if it has not.

    Args:
        given: a mesh of one dimension, over which samples differ; None to find out.
        rank: of this process, of `size`.

    Raises:
        PlanError: the plan does something else with the model than average over replicas.
        UsageError: ranks lie in another order than Weft can follow.
    """
    tensors = [p for model in models for p in model.parameters() if is_dtensor(p)]
    if given is None and not tensors:
        return None
    if plan != Plan(data=plan.data, compress=plan.compress, topology=plan.topology):
        raise PlanError(
            f"model is parallelised by PyTorch already, and the plan would split it (plan: {plan}); use data"
        )
    if plan.sends_factors:
        raise PlanError(
            f"model is parallelised by PyTorch, and has no factors to send (plan: {plan}); use compress=none"
        )
    reduced = frozenset(id(p) for model in models for module in model.modules() for p in _sharded_by_fsdp(module))
    num_data = _num_data_of_fsdp(models)
    if given is not None:
        return TorchParallel(_mesh_beside(given, rank, size), reduced, differs=not tensors)
    widest = max(tensors, key=lambda p: int(_as_any(p).device_mesh.size()))
    num_held = int(_as_any(widest).device_mesh.size())
    if num_data == num_held:  # FSDP alone
        return TorchParallel(_mesh_beside(_as_any(widest).device_mesh, rank, size), reduced)
    width = num_held // num_data if num_data else num_held
    if num_data and num_held != size:
        raise _unfit(f"ranks that hold a parameter: {num_held}, started: {size}")
    _check_neighbours(widest, width, rank)
    if size % width:
        raise _unfit(f"ranks of a replica: {width}, started: {size}")
    return TorchParallel(Mesh(rank, data=size // width, tensor=width), reduced)


@contextmanager
def use_torch_parallel(found: TorchParallel, plan: Plan, place: AbstractPlace) -> Iterator[DataParallel]:
    """Be one of the ranks, until the block ends: gradients are added up over replicas alone."""
    with ExitStack() as opened:
        world = place.open_group(plan)
        opened.callback(world.close)
        groups = MeshGroups(world, found.mesh)
        opened.callback(groups.close)
        # Not with the world: stages of a pipeline are in their backward at different times.
        yield DataParallel(groups.replicas, mesh=found.mesh, codec=make_codec(plan.compress, rank=groups.mesh.replica))


def _mesh_beside(given: Any, rank: int, size: int) -> Mesh:
    """The mesh in which samples differ over `given`, and all else is PyTorch's."""
    ranks = given.mesh.flatten().tolist()
    count, width = len(ranks), max(1, size // len(ranks))
    if rank not in ranks or size % count:
        raise _unfit(f"mesh of samples: {ranks}, rank: {rank}, started: {size}")
    if ranks == list(range(rank % width, size, width)):
        return Mesh(rank, data=count, tensor=width)
    first = rank // count * count
    if ranks == list(range(first, first + count)):
        return Mesh(rank, pipeline=width, data=count)
    raise _unfit(f"mesh of samples: {ranks}, started: {size}")


def _check_neighbours(parameter: Tensor, width: int, rank: int) -> None:
    """The ranks of a replica follow each other, as in a mesh whose last dimensions are theirs."""
    ranks = _as_any(parameter).device_mesh.mesh.flatten().view(-1, width)
    own = next((row for row in ranks.tolist() if rank in row), None)
    first = rank // width * width
    if own != list(range(first, first + width)):
        raise _unfit(f"ranks of a replica: {own}, rank: {rank}")


def _unfit(about: str) -> UsageError:
    cure = "build one with init_device_mesh('cpu', (replicas, parts)), parts last, over all ranks"
    return UsageError(f"mesh of the model does not fit the ranks ({about}); {cure}")


# FSDP2.


def _sharded_by_fsdp(module: nn.Module) -> list[Tensor]:
    state = _state_of_fsdp(module)
    group = state._fsdp_param_group if state is not None else None
    return [one.sharded_param for one in group.fsdp_params] if group is not None else []


def _num_data_of_fsdp(models: Sequence[nn.Module]) -> int:
    """The ranks over which FSDP averages gradients; 0 where it does not."""
    found = set()
    for module in (module for model in models for module in model.modules()):
        state = _state_of_fsdp(module)
        if state is not None and state._fsdp_param_group is not None:
            about = state._fsdp_param_group.mesh_info
            sizes = (getattr(about, "shard_mesh_size", 1), getattr(about, "replicate_mesh_size", 1))
            found.add(sizes[0] * sizes[1])
    if len(found) > 1:
        raise _unfit(f"fully_shard over {' and '.join(map(str, sorted(found)))} ranks")
    return found.pop() if found else 0


def _state_of_fsdp(module: nn.Module) -> Any:
    known = sys.modules.get("torch.distributed.fsdp")
    is_sharded = known is not None and isinstance(module, known.FSDPModule)
    return _as_any(module)._get_fsdp_state() if is_sharded else None


def _as_any(value: object) -> Any:
    return value
