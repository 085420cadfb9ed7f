"""Level 0: operators, their gradients and costs; Python and C++; checks and timings."""

from weft.operators.aten_cost import CountedCost, cost_of, count_cost, register_cost
from weft.operators.bench import BenchResult, Placement, bench_operator
from weft.operators.check import Finding, check_operator
from weft.operators.compile import compile_library, find_compiler
from weft.operators.cost import Cost, CostFormula, tensor_bytes
from weft.operators.cpp import cpp_operator
from weft.operators.operator import Operator, load_operators, operator
from weft.operators.roofline import Ceiling, Peak, Roofline, measure_roofline

__all__ = [
    "BenchResult",
    "Ceiling",
    "Cost",
    "CostFormula",
    "CountedCost",
    "Finding",
    "Operator",
    "Peak",
    "Placement",
    "Roofline",
    "bench_operator",
    "check_operator",
    "compile_library",
    "cost_of",
    "count_cost",
    "cpp_operator",
    "find_compiler",
    "load_operators",
    "measure_roofline",
    "operator",
    "register_cost",
    "tensor_bytes",
]
