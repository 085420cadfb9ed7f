"""Stages of a pipeline that PyTorch runs: every rank has a model of its own, which together are one.

    ranks 0, 1    a.weight  a.bias                 saved, exported: a.weight  a.bias  c.weight  c.bias
    ranks 2, 3              c.weight  c.bias       loaded: each rank the names that it has

Names are those of the whole model. An optimizer numbers its parameters, which is of no use elsewhere: its state goes
back to as many ranks as saved it.
"""

from typing import Any

from torch import Tensor, nn

from weft.distributed.script.saving.parts import digest_of
from weft.distributed.script.saving.structure import Taken
from weft.distributed.script.weaving.weaving import Weaving
from weft.errors import UsageError
from weft.training.checkpoint import Ranks

__all__ = ["are_stages", "check_names", "join_structures"]


def are_stages(weaving: Weaving | None) -> bool:
    return weaving is not None and weaving.torch_parallel is not None and weaving.torch_parallel.differs


def check_names(name: str, model: nn.Module, weaving: Weaving, ranks: Ranks) -> None:
    """A collective call.

    Raises:
        UsageError: on all ranks, if two stages give one name to tensors that differ.
    """
    state = {key: value for key, value in model.state_dict().items() if isinstance(value, Tensor)}
    own = {key: digest_of(Taken(None, {key: value})) for key, value in state.items()}
    replica = weaving.replicas.mesh.replica if weaving.replicas is not None else 0
    known: dict[str, str] = {}
    for one in ranks.gather_json({"replica": replica, "digests": own}):
        for key, digest in one["digests"].items() if one["replica"] == 0 else ():
            if known.setdefault(key, digest) != digest:
                cure = "give modules of stages the names that they have in the whole model"
                raise UsageError(f"two stages have tensors of one name that differ ({name}: {key}); {cure}")


def join_structures(structure: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """The keys of all stages. A collective call."""
    return {key: value for one in ranks.gather_json(structure) for key, value in one.items()}
