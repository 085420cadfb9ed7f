"""What workers and servers of one plan have in common, as data."""

from dataclasses import dataclass
from typing import cast

from weft.distributed.consistency.server.arrival import Arrival
from weft.distributed.consistency.server.policy import AbstractPolicy
from weft.distributed.consistency.server.rounds import Rounds
from weft.distributed.consistency.server.shard import Form, Rate
from weft.specs.plan import Choice, Plan
from weft.training.optimizers import AbstractOptimizer, Optimizer

__all__ = ["Settings", "make_policy", "may_cut", "settings_of"]


@dataclass(frozen=True)
class Settings:
    """Args:
    may_cut: whether the optimizer may run on pieces of a tensor.
    deals_work: whether step i is share i mod N of batch i div N, for whoever asks; else it is a batch, of which
        every rank has its own share.
    clips_own: whether a worker clips its own gradient; else the server clips the sum.
    parts: into how many groups shards are divided that are reached in turn, one in a step.
    period: steps that a rank takes from one exchange to the next; work is dealt out in as many at a time.
    alpha: of the spring between a rank and the centre.
    inner: ranks to a host server; 1 where there are none.
    """

    num_workers: int
    num_shards: int
    rate: Rate
    may_cut: bool = True
    deals_work: bool = False
    clip_norm: float | None = None
    form: Form = "gradient"
    parts: int = 1
    period: int = 1
    alpha: float = 0.0
    inner: int = 1

    @property
    def clips_own(self) -> bool:
        return self.clip_norm is not None and (self.deals_work or self.form == "difference")

    @property
    def is_sent_early(self) -> bool:
        """Whether gradients may set out before all are there, because nothing will change them."""
        return not self.clips_own and self.form == "gradient" and self.parts == 1

    def batch_of(self, step: int) -> int:
        return step // self.num_workers if self.deals_work else step

    def share_of(self, rank: int, step: int) -> int:
        return step % self.num_workers if self.deals_work else rank

    def first_after(self, num_batches: int) -> int:
        """What a rank may take first when so many batches are done with."""
        return -(-num_batches * self.num_workers // self.period) if self.deals_work else num_batches

    def is_due(self, shard: int, turn: int) -> bool:
        return shard % self.parts == turn % self.parts


def may_cut(optimizer: AbstractOptimizer) -> bool:
    """Whether an optimizer's rule may run on any cut of a tensor; of torch.optim it is not known."""
    return isinstance(optimizer, Optimizer) and optimizer.rule.scope == "element"


def settings_of(plan: Plan, optimizer: AbstractOptimizer, clip_norm: float | None = None) -> Settings:
    """The settings of a plan whose consistency is kept by servers."""
    consistency = dict(plan.consistency.parameters)
    if plan.consistency.name == "elastic":
        return Settings(
            num_workers=plan.num_ranks,
            num_shards=int(plan.topology["shards"]),
            rate="full",
            deals_work=True,
            clip_norm=clip_norm,
            form="elastic",
            period=int(consistency["steps"]),
            alpha=float(consistency["beta"]) / plan.num_ranks,
        )
    by_arrival = plan.consistency.name == "async" or consistency.get("commit") == "arrival"
    rate = cast(Rate, consistency["lr"] if by_arrival else "together")
    return Settings(
        num_workers=plan.num_ranks,
        num_shards=int(plan.topology["shards"]),
        rate=rate,
        may_cut=may_cut(optimizer),
        deals_work=by_arrival,
        clip_norm=clip_norm,
        form=cast(Form, consistency.get("push", "gradient")),
        parts=int(consistency.get("parts", 1)),
        inner=int(plan.topology.get("inner", 1)),
    )


def make_policy(consistency: Choice, num_workers: int, *, is_fresh: bool = True) -> AbstractPolicy:
    """The policy of every shard; not fresh for one that takes the place of a shard that was lost."""
    if consistency.name in ("async", "elastic"):
        return Arrival(num_workers, is_fresh=is_fresh)
    if consistency.name == "stale":
        if consistency["commit"] == "arrival":
            return Arrival(num_workers, float(consistency["bound"]), is_fresh=is_fresh)
        return Rounds(num_workers, bound=int(consistency["bound"]), is_fresh=is_fresh)
    text = str(consistency["deadline"])
    seconds = None if text == "adaptive" else float("inf") if text == "none" else float(text)
    return Rounds(num_workers, spare=int(consistency["workers"]), deadline=seconds, is_fresh=is_fresh)
