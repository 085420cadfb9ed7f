"""Run records as tables; reads records only."""

from weft.report.comparison import MetricComparison, RunComparison, check_comparable, compare_runs, render_comparison
from weft.report.summary import render_run

__all__ = [
    "MetricComparison",
    "RunComparison",
    "check_comparable",
    "compare_runs",
    "render_comparison",
    "render_run",
]
