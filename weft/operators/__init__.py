"""Level 0: operators, their gradients and costs; Python and C++; checks and timings."""

from weft.operators.aten_cost import CountedCost, cost_of, count_cost, register_cost
from weft.operators.compile import compile_library, find_compiler
from weft.operators.cost import Cost, CostFormula, tensor_bytes
from weft.operators.cpp import cpp_operator
from weft.operators.operator import Operator, operator

__all__ = [
    "Cost",
    "CostFormula",
    "CountedCost",
    "Operator",
    "compile_library",
    "cost_of",
    "count_cost",
    "cpp_operator",
    "find_compiler",
    "operator",
    "register_cost",
    "tensor_bytes",
]
