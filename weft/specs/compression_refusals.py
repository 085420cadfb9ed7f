"""Combinations of compression that are refused: each with its reason and the nearest plan that makes sense."""

from dataclasses import replace

from weft.specs.axes import AXES
from weft.specs.plan import Choice, Plan, value_of
from weft.specs.refusal import Refusal, with_parameters

__all__ = ["COMPRESSION_REFUSALS"]

BF16 = Choice("bf16", tuple(AXES["compress"]["bf16"].parameters.items()))
TOPK = Choice("topk", tuple(AXES["compress"]["topk"].parameters.items()))


def _is_carried(plan: Plan) -> bool:
    """Whether the channel of a plan has a codec for what it sends; in a group too it may be sent to one rank alone."""
    channels = value_of("compress", plan.compress).realised_by
    return plan.channel in channels and (not _is_between_two(plan) or "servers" in channels)


def _is_between_two(plan: Plan) -> bool:
    """Whether ranks send weights, or what stands for them, to one rank or server at a time."""
    return plan.sends == "weights" and not value_of("consistency", plan.consistency).traits.has_all_reduce


def _lacks_weights(plan: Plan) -> bool:
    """Whether one would send another weights with a codec that cannot carry them."""
    return _is_between_two(plan) and not _needs(plan, "carries_weights")


def _sends_packed_changes(plan: Plan) -> bool:
    """Whether parts of layers and whole ones travel in one message, whose numbers are weighed against each other."""
    is_relaxed = plan.sends == "weights" and plan.channel != "servers"
    return not _needs(plan, "carries_weights") and (is_relaxed or plan.shard > 1)


def _can_estimate(plan: Plan) -> bool:
    return value_of("compress", plan.compress).coding.makes_estimates(plan.compress.parameters)


def _needs(plan: Plan, trait: str) -> bool:
    return bool(getattr(value_of("compress", plan.compress).coding, trait))


COMPRESSION_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        lambda plan: plan.num_replicas > 1 and not _is_carried(plan),
        "messages of this compression mean nothing to one who has not sent one of the same step",
        lambda plan: replace(plan, compress=TOPK),
    ),
    Refusal(
        lambda plan: _lacks_weights(plan) and plan.commits_on_arrival,
        "this compression sends changes, and the centre would keep a copy of the model for what each rank knows of it",
        lambda plan: replace(plan, compress=BF16),
    ),
    Refusal(
        lambda plan: _lacks_weights(plan) and plan.channel == "neighbours",
        "this compression sends changes, and nobody knows what another has heard where chance or death says who meets",
        lambda plan: replace(plan, compress=BF16),
    ),
    Refusal(
        lambda plan: _lacks_weights(plan) and not _can_estimate(plan),
        "neighbours estimate each other's weights, which takes messages of known length that each come nearer",
        lambda plan: replace(plan, compress=TOPK),
    ),
    Refusal(
        lambda plan: plan.splits_tensors and _sends_packed_changes(plan),
        "ranks that split layers hold the others alike, and would each be sent other changes of them",
        lambda plan: replace(plan, compress=BF16),
    ),
    Refusal(
        lambda plan: plan.consistency.get("gamma", "auto") != "auto" and not _lacks_weights(plan),
        "gamma is for ranks that estimate each other's weights, and these send them",
        lambda plan: replace(plan, consistency=with_parameters(plan.consistency, gamma="auto")),
    ),
    Refusal(
        lambda plan: _needs(plan, "takes_momentum") and plan.num_replicas > 1 and not plan.is_synchronous,
        "momentum is corrected where ranks add up their gradients in every step",
        lambda plan: replace(plan, compress=TOPK),
    ),
    Refusal(
        lambda plan: _needs(plan, "takes_momentum") and plan.is_streamed,
        "stages of PipeDream update each at its own time, with momentum of their own",
        lambda plan: replace(plan, compress=TOPK),
    ),
    Refusal(
        lambda plan: _needs(plan, "takes_momentum") and plan.expert > 1 and float(plan.compress.get("clip", 0.0)) > 0,
        "gradients of ranks with experts are of the samples of all, and their norms are not those of a rank's own",
        lambda plan: replace(plan, compress=with_parameters(plan.compress, clip=0.0)),
    ),
    Refusal(
        lambda plan: _needs(plan, "needs_group") and (not plan.is_synchronous or plan.shard > 1 or plan.is_streamed),
        "whether to compress is decided where ranks add up whole gradients in every step",
        lambda plan: replace(plan, compress=TOPK),
    ),
    Refusal(
        lambda plan: _needs(plan, "needs_matrices") and plan.shard > 1,
        "factors are those of whole matrices, and ranks add up pieces of them",
        lambda plan: replace(plan, compress=TOPK),
    ),
)
