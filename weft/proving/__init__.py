"""Proofs that a plan computes what one rank computes, and an executor what another does."""

from weft.proving.convergence import check_convergence, check_target
from weft.proving.executors import prove_executors
from weft.proving.proof import Proof
from weft.proving.prove import prove

__all__ = ["Proof", "check_convergence", "check_target", "prove", "prove_executors"]
