"""Products of placements with the other axes that are refused, as rows of a table.

A consistency other than sync is kept between replicas that each hold the whole model, in one rank or in several: a
pipeline, a group that splits layers. What replicas hold together (`shard`, `expert`, `linear`) they update together.

                 sync   topology=server   local, elastic, gossip   async, stale, backup   gossip(mix=pair)   measured
    data          x            x                    x                       x                    x              x
    tensor        x            x                    x                       x                    -              x
    pipeline      x            x                    x                       x                    -              x
      pipedream   x            -                    -                       -                    -              -
    shard         x            -                    -                       -                    -         but level 3
    expert        x            -                    -                       -                    -              -
    linear        x            -                    -                       -                    -              -
"""

import math
from dataclasses import replace

from weft.specs.axes import AXES
from weft.specs.plan import Choice, Plan
from weft.specs.refusal import Refusal, with_parameters

__all__ = ["PLACEMENT_REFUSALS"]


def _is_synchronous_group(plan: Plan) -> bool:
    return plan.is_synchronous and plan.channel == "all_reduce"


def _in_step(plan: Plan) -> Plan:
    return replace(plan, consistency=Choice("sync"), topology=Choice("native"))


def _with_equal_shares(plan: Plan) -> Plan:
    return replace(plan, share=Choice("equal"))


def _mixes_samples(plan: Plan) -> bool:
    return plan.expert > 1 or plan.linear > 1


def _streams(plan: Plan) -> bool:
    """Whether stages update with every micro-batch."""
    return plan.pipeline > 1 and plan.schedule.name == "pipedream"


def _one_by_one(plan: Plan) -> Plan:
    """With the usual schedule."""
    usual = Choice("1f1b", tuple(AXES["schedule"]["1f1b"].parameters.items()))
    return replace(plan, schedule=usual)


def _cut_as_usual(plan: Plan) -> Plan:
    return replace(plan, cut=Plan().cut)


def _is_measured(plan: Plan) -> bool:
    return plan.measured_every is not None


def _gathers_parameters(plan: Plan) -> bool:
    """Whether ranks hold parts of parameters, and gather them when they are needed."""
    return plan.shard > 1 and plan.shard_level.name == "3"


def _as_they_are(plan: Plan) -> Plan:
    return replace(plan, compress=Choice("none"))


def _in_groups(plan: Plan) -> Plan:
    usual = Choice("gossip", tuple(AXES["consistency"]["gossip"].parameters.items()))
    return replace(plan, consistency=with_parameters(usual, graph=plan.consistency["graph"]))


PLACEMENT_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        lambda plan: plan.shard > 1 and not plan.is_synchronous,
        "ranks that hold the optimizer's state together update together, in every step",
        _in_step,
    ),
    Refusal(
        lambda plan: plan.shard > 1 and plan.channel == "servers",
        "servers hold the optimizer's state already, each its part",
        lambda plan: replace(plan, data=plan.data * plan.shard, shard=1),
    ),
    Refusal(
        lambda plan: _mixes_samples(plan) and not _is_synchronous_group(plan),
        "layers that replicas hold together get gradients of all of them, in every step and by no servers",
        _in_step,
    ),
    Refusal(
        lambda plan: plan.linear > 1 and plan.compress != Choice("none"),
        "gradients of linear layers are not sent, of activations they are, and those are not compressed",
        _as_they_are,
    ),
    Refusal(
        lambda plan: plan.sends_factors and plan.channel == "servers",
        "servers hold pieces of weights, and take gradients that workers have multiplied",
        _as_they_are,
    ),
    Refusal(
        lambda plan: plan.sends_factors and not plan.is_synchronous,
        "factors are of a gradient, and ranks of this consistency send weights, which have none",
        _as_they_are,
    ),
    Refusal(
        lambda plan: plan.sends_factors and (plan.splits_layers or plan.shard > 1),
        "every rank multiplies the factors of all ranks for whole layers, and here it holds parts of them",
        _as_they_are,
    ),
    Refusal(
        lambda plan: plan.splits_model and plan.channel == "neighbours",
        "ranks that meet one by one would average each part of a model with another replica",
        _in_groups,
    ),
    Refusal(
        lambda plan: plan.splits_model and plan.ranks_per_host > 1,
        "a host server joins the gradients of whole models, and ranks have parts",
        lambda plan: replace(plan, topology=with_parameters(plan.topology, inner=1)),
    ),
    Refusal(
        lambda plan: _streams(plan) and not _is_synchronous_group(plan),
        "stages that update with every micro-batch have no step in common in which replicas could meet",
        _one_by_one,
    ),
    Refusal(
        lambda plan: plan.cut != Plan().cut and plan.pipeline == 1,
        "a model in one stage is not cut",
        _cut_as_usual,
    ),
    Refusal(
        lambda plan: plan.activations != Plan().activations and not plan.splits_model,
        "activations travel between stages (pipeline=N) and between parts of layers (tensor=N), and there are none",
        lambda plan: replace(plan, activations=Plan().activations),
    ),
    Refusal(
        lambda plan: _streams(plan) and (plan.shard > 1 or _mixes_samples(plan)),
        "stages that update with every micro-batch are replicated on data alone",
        _one_by_one,
    ),
    Refusal(
        lambda plan: _streams(plan) and plan.stage_memory < math.inf,
        "stages that update with every micro-batch keep several versions of their weights, which no bound counts",
        lambda plan: replace(plan, cut=with_parameters(plan.cut, memory=math.inf)),
    ),
    Refusal(
        lambda plan: _streams(plan) and _is_measured(plan),
        "stages that update with every micro-batch do not end a step together, and none is seen to be slower",
        _with_equal_shares,
    ),
    Refusal(
        lambda plan: _is_measured(plan) and plan.num_replicas == 1,
        "one replica takes every batch whole",
        _with_equal_shares,
    ),
    Refusal(
        lambda plan: _is_measured(plan) and plan.commits_on_arrival,
        "work is dealt as ranks ask for it, so that a fast one takes more already",
        _with_equal_shares,
    ),
    Refusal(
        lambda plan: _is_measured(plan) and not plan.is_synchronous,
        "replicas of this consistency do not count by their shares in every step",
        _with_equal_shares,
    ),
    Refusal(
        lambda plan: _is_measured(plan) and (_mixes_samples(plan) or _gathers_parameters(plan)),
        "ranks wait for each other inside of the model, and none is seen to be slower",
        _with_equal_shares,
    ),
)
