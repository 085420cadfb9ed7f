"""Level 1: the training step, and what executes it."""

from weft.graph.blame import Difference, first_difference, relative_error
from weft.graph.capture import Step, capture
from weft.graph.collectives import StartAllReduce, all_reduce, start_all_reduce, use_collectives, wait
from weft.graph.define_by_run import Recording, record
from weft.graph.drawing import svg_of
from weft.graph.eager import EagerExecutor
from weft.graph.edits import (
    add_input,
    add_operator,
    add_output,
    remove_input,
    remove_operator,
    remove_output,
    replace_operator,
    replace_variable,
)
from weft.graph.executor import AbstractExecutor, GradientSink, Loss, Outputs, State
from weft.graph.extension import extend, grad, replace_gradient, update_state
from weft.graph.fusion import fuse, regions_of, unfuse
from weft.graph.generated import GraphExecutor
from weft.graph.graph import Graph, Operator, Variable
from weft.graph.initialisation import build_sized
from weft.graph.loops import draw_schedule, loop
from weft.graph.module_steps import Update, inference_step, training_step, updating_step
from weft.graph.planned import PlannedProgram, Terms
from weft.graph.profile import KindProfile, OperatorProfile, Profile, profile_of
from weft.graph.program import AbstractProgram, HasPrograms, Program
from weft.graph.reference import ReferenceExecutor
from weft.graph.rewrites import EXACT, REASSOCIATING, Rule, rewrite
from weft.graph.saved import load_graph, save_graph
from weft.graph.sizes import Condition, Size
from weft.graph.tape import TapeProgram, Timed
from weft.graph.text import text_of
from weft.graph.validity import check_graph, check_pass, check_shapes
from weft.graph.whole_step import WholeStep

__all__ = [
    "EXACT",
    "REASSOCIATING",
    "AbstractExecutor",
    "AbstractProgram",
    "Condition",
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
    "Recording",
    "ReferenceExecutor",
    "Rule",
    "Size",
    "StartAllReduce",
    "State",
    "Step",
    "TapeProgram",
    "Terms",
    "Timed",
    "Update",
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
    "updating_step",
    "use_collectives",
    "wait",
]
