"""Proofs that a plan computes what one rank computes, and an executor what another does."""

from weft.proving.convergence import check_convergence, check_target
from weft.proving.executors import prove_executors
from weft.proving.plan_proof import prove
from weft.proving.proof import Proof

__all__ = ["Proof", "check_convergence", "check_target", "prove", "prove_executors"]
