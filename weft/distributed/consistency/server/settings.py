"""The settings that workers and servers of one plan share."""

from dataclasses import dataclass
from typing import cast

from weft.distributed.codecs import AbstractCodec, ExactCodec, make_codec
from weft.distributed.consistency.server.shard import Rate
from weft.specs import Choice, Plan
from weft.specs.axes import Sends
from weft.training.optimizers import AbstractOptimizer

__all__ = ["Settings", "may_cut", "settings_of"]

AS_IT_IS = Choice("none")


@dataclass(frozen=True)
class Settings:
    """Args:
    may_cut: whether the optimizer may run on pieces of a tensor.
    deals_work: whether step i is share i mod N of batch i div N, for whoever asks; else it is a batch, of which
        every rank has its own share.
    clips_own: whether a worker clips its own gradient; else the server clips the sum.
    form: what is pushed: gradients, for the shard's optimizer; differences, which are added; or weights of a rank,
        which draw the centre, which the shard holds, towards themselves.
    parts: into how many groups shards are divided that are reached in turn, one in a step.
    period: steps that a rank takes from one exchange to the next; work is dealt out in as many at a time.
    alpha: of the elastic force between a rank and the centre.
    inner: ranks to a host server; 1 where there are none.
    is_synchronous: ranks meet in every step: each hears of the loss of all, and all sum, agree and evaluate together.
    compress: what is sent instead of pushes, and of weights to ranks if it can carry them; the shards keep theirs as
        they are.
    """

    num_workers: int
    num_shards: int
    rate: Rate
    may_cut: bool = True
    deals_work: bool = False
    clip_norm: float | None = None
    form: Sends = "gradient"
    parts: int = 1
    period: int = 1
    alpha: float = 0.0
    inner: int = 1
    is_synchronous: bool = False
    compress: Choice = AS_IT_IS

    def make_codec(self, address: int = 0) -> AbstractCodec:
        """Of pushes, for one end.

        Args:
            address: of whoever encodes, where codecs round by chance.
        """
        return make_codec(self.compress, "servers", rank=address)

    def make_weights_codec(self) -> AbstractCodec:
        """Of weights on their way to ranks: as they are where the codec of pushes cannot carry them."""
        codec = self.make_codec()
        return codec if codec.carries_weights else ExactCodec()

    @property
    def shards(self) -> range:
        """The addresses of servers, which come after those of workers."""
        return range(self.num_workers, self.num_workers + self.num_shards)

    @property
    def hosts(self) -> range:
        """The addresses of host servers, which come last."""
        num_hosts = -(-self.num_workers // self.inner) if self.inner > 1 else 0
        return range(self.shards.stop, self.shards.stop + num_hosts)

    def host_of(self, rank: int) -> int:
        """The address of a rank's host server."""
        return self.shards.stop + rank // self.inner

    @property
    def clips_together(self) -> bool:
        """Whether shards must tell each other norms to clip the sum of a round."""
        return self.clip_norm is not None and self.is_synchronous and self.num_shards > 1

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
        """The first step that a rank may take when so many batches are done with."""
        return -(-num_batches * self.num_workers // self.period) if self.deals_work else num_batches

    def is_due(self, shard: int, turn: int) -> bool:
        return shard % self.parts == turn % self.parts


def may_cut(optimizer: AbstractOptimizer) -> bool:
    """Whether an optimizer may run on any cut of a tensor."""
    return optimizer.scope == "element"


def settings_of(plan: Plan, optimizer: AbstractOptimizer, clip_norm: float | None = None) -> Settings:
    """The settings of a plan whose consistency is kept by servers.

    Args:
        optimizer: of the recipe: whether it may run on pieces of tensors.
        clip_norm: the largest norm of a gradient; None not to clip.
    """
    choice, sends_weights = plan.consistency, plan.sends == "weights"
    # A norm has the bits of one rank only where it is of a whole tensor.
    clips_together = plan.is_synchronous and clip_norm is not None and plan.num_shards > 1
    return Settings(
        num_workers=plan.num_replicas,
        num_shards=plan.num_shards,
        rate=cast(Rate, choice.get("lr", "full") if plan.commits_on_arrival else "together"),
        may_cut=sends_weights or (may_cut(optimizer) and not clips_together),
        deals_work=plan.commits_on_arrival,
        clip_norm=clip_norm,
        form=plan.sends,
        parts=int(choice.get("parts", 1)),
        period=plan.period,
        alpha=float(choice.get("beta", 0.0)) / plan.num_replicas,
        inner=plan.ranks_per_host,
        is_synchronous=plan.is_synchronous,
        compress=plan.compress,
    )
