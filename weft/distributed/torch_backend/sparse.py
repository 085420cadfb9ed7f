"""The sum of sparse tensors: indices and values of all ranks are gathered, and those of one place added.

rank 0   places 2, 5          all   places 2, 5 | 5, 7, 9   ->   2, 5, 7, 9
rank 1   places 5, 7, 9
"""

import torch
from torch import Tensor

from weft.distributed.group.group import AbstractGroup
from weft.errors import UsageError

__all__ = ["all_reduce_sparse"]


def all_reduce_sparse(group: AbstractGroup, tensor: Tensor) -> None:
    """Sum over ranks, in place, coalesced. The tensors are alike but for how many places they have, maybe none.

    Raises:
        UsageError: the layout is another one than COO.
    """
    if tensor.layout is not torch.sparse_coo:
        raise UsageError(f"sparse tensors travel as coordinates (layout: {tensor.layout}); call to_sparse_coo()")
    own = tensor.coalesce()
    indices, values = own.indices().T.contiguous(), own.values().contiguous()
    counts = torch.empty(group.size, dtype=torch.int64)
    group.all_gather(counts, torch.tensor([len(values)]))
    sizes = tuple(map(int, counts))
    all_indices = indices.new_empty(sum(sizes), indices.shape[1])
    all_values = values.new_empty(sum(sizes), *values.shape[1:])
    if sum(sizes):
        group.all_gather(all_indices, indices, sizes)
        group.all_gather(all_values, values, sizes)
    total = torch.sparse_coo_tensor(all_indices.T, all_values, tensor.shape, check_invariants=False)
    tensor.copy_(total.coalesce())
