"""The training that a plan is realised for: what servers need to know of it, and where decisions are recorded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weft.distributed.consistency.server import Settings
from weft.distributed.consistency.server.tuning import AbstractTunedOptimizer
from weft.training.build import build_optimizer
from weft.training.optimizers import AbstractOptimizer
from weft.training.recipe import Recipe

__all__ = ["RunSpec"]


@dataclass(frozen=True)
class RunSpec:
    """The seeds to train from, one after the other, and what all of these trainings have in common.

    Args:
        optimizer: of the recipe, for servers that update in the place of ranks; None where no plan needs one.
        buffers: running statistics before an evaluation: averaged, or each rank's own.
        run: the run folder, where ranks and servers record what they decide; None to record nothing.
        whole_gradients: whether the loop looks at gradients between backward and update, as a script's own may: then
            every rank gets all of them, where it would do with those that it updates with.
        rules: globs of layers' names, and how such layers are split; the first that fits a name counts.
        replay: the run folder whose decisions are repeated; None to decide anew.
        make_updates: of a script, whose optimizer has parameter groups and settings that change: the optimizer of one
            shard of the servers. None for `optimizer`, as it is.
    """

    optimizer: AbstractOptimizer | None = None
    seeds: tuple[int, ...] = (0,)
    clip_norm: float | None = None
    buffers: Literal["mean", "rank"] = "mean"
    run: Path | None = None
    replay: Path | None = None
    whole_gradients: bool = False
    make_updates: Callable[[int, Settings], AbstractTunedOptimizer] | None = None
    rules: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(recipe: Recipe, seeds: Sequence[int], run: Path | None = None, replay: Path | None = None) -> "RunSpec":
        mutable = recipe.mutable
        return RunSpec(
            build_optimizer(recipe),
            tuple(seeds),
            mutable.clip_norm,
            mutable.buffers,
            run,
            replay,
            rules=mutable.rules,
        )
