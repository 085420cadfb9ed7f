"""Graphs on JAX and XLA; needs the extra `jax`."""

from weft.graph.jax.jax_program import JaxProgram
from weft.graph.jax.table import OPERATORS

__all__ = ["OPERATORS", "JaxProgram"]
