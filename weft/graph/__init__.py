"""Level 1: the training step as one graph, and what executes it.

    ir             the graph itself: operators, variables, symbolic sizes, verification
    capture        from Python code to a graph
    rewrites       fewer or cheaper operators, the same values
    editing        operators, gradients and outputs added to a graph
    fusion         element-wise parts as regions that Inductor compiles; exact_fusion: to the bits of ATen
    formats        a graph as text, as a drawing, as a folder
    programs       a graph made runnable; memory_plan: with storage that is reused
    loops          iterations as one operator with a gradient
    executors      a module and its loss made runnable; jax and onnx: by XLA and by ONNX Runtime

No folder imports one that imports it.
"""

from weft.graph.capture.capture import Step, capture
from weft.graph.capture.define_by_run import record
from weft.graph.capture.lazy_layers import build_sized
from weft.graph.editing.extension import extend, grad, replace_gradient, update_state
from weft.graph.editing.node_edits import (
    add_input,
    add_operator,
    add_output,
    remove_input,
    remove_operator,
    remove_output,
    replace_operator,
    replace_variable,
)
from weft.graph.executors.eager import EagerExecutor
from weft.graph.executors.executor import AbstractExecutor, GradientSink, Loss, Outputs, State
from weft.graph.executors.graph_executor import GraphExecutor, HasPrograms
from weft.graph.executors.module_steps import UpdateFunction, inference_step, training_step
from weft.graph.executors.reference import ReferenceExecutor
from weft.graph.executors.whole_step import WholeStep
from weft.graph.formats.graph_text import text_of
from weft.graph.formats.saved_graph import load_graph, save_graph
from weft.graph.formats.svg_drawing import svg_of
from weft.graph.fusion import fuse, regions_of, unfuse
from weft.graph.ir.collectives import all_reduce, start_all_reduce, use_collectives, wait
from weft.graph.ir.graph import Graph, Operator, Variable
from weft.graph.ir.verification import check_graph, check_pass, check_shapes
from weft.graph.loops import draw_schedule, loop
from weft.graph.memory_plan import PlannedProgram, Signature
from weft.graph.programs.first_difference import Difference, first_difference, relative_error
from weft.graph.programs.generated_program import Program
from weft.graph.programs.operator_profile import KindProfile, OperatorProfile, Profile, profile_of
from weft.graph.programs.program import AbstractProgram
from weft.graph.programs.tape_program import TapeProgram
from weft.graph.rewrites import EXACT, Rule, rewrite

__all__ = [
    "EXACT",
    "AbstractExecutor",
    "AbstractProgram",
    "Difference",
    "EagerExecutor",
    "GradientSink",
    "Graph",
    "GraphExecutor",
    "HasPrograms",
    "KindProfile",
    "Loss",
    "Operator",
    "OperatorProfile",
    "Outputs",
    "PlannedProgram",
    "Profile",
    "Program",
    "ReferenceExecutor",
    "Rule",
    "Signature",
    "State",
    "Step",
    "TapeProgram",
    "UpdateFunction",
    "Variable",
    "WholeStep",
    "add_input",
    "add_operator",
    "add_output",
    "all_reduce",
    "build_sized",
    "capture",
    "check_graph",
    "check_pass",
    "check_shapes",
    "draw_schedule",
    "extend",
    "first_difference",
    "fuse",
    "grad",
    "inference_step",
    "load_graph",
    "loop",
    "profile_of",
    "record",
    "regions_of",
    "relative_error",
    "remove_input",
    "remove_operator",
    "remove_output",
    "replace_gradient",
    "replace_operator",
    "replace_variable",
    "rewrite",
    "save_graph",
    "start_all_reduce",
    "svg_of",
    "text_of",
    "training_step",
    "unfuse",
    "update_state",
    "use_collectives",
    "wait",
]
