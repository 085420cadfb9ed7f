"""Level 1: the training step, and what executes it."""

from weft.graph.capture import Step, capture
from weft.graph.drawing import svg_of
from weft.graph.eager import EagerExecutor
from weft.graph.executor import AbstractExecutor, GradientSink, Loss, Outputs, State
from weft.graph.extension import extend, grad, replace_gradient, update_state
from weft.graph.generated import GraphExecutor, inference_step, training_step
from weft.graph.graph import Graph, Operator, Variable
from weft.graph.program import Program
from weft.graph.reference import ReferenceExecutor
from weft.graph.rewrites import EXACT, Rule, rewrite
from weft.graph.saved import load_graph, save_graph
from weft.graph.text import text_of
from weft.graph.validity import check_graph, check_pass, check_shapes

__all__ = [
    "EXACT",
    "AbstractExecutor",
    "EagerExecutor",
    "GradientSink",
    "Graph",
    "GraphExecutor",
    "Loss",
    "Operator",
    "Outputs",
    "Program",
    "ReferenceExecutor",
    "Rule",
    "State",
    "Step",
    "Variable",
    "capture",
    "check_graph",
    "check_pass",
    "check_shapes",
    "extend",
    "grad",
    "inference_step",
    "load_graph",
    "replace_gradient",
    "rewrite",
    "save_graph",
    "svg_of",
    "text_of",
    "training_step",
    "update_state",
]
