"""The virtual cluster as an instrument: trainings on many ranks, real mathematics in virtual time."""

from weft.simulation.simulation import Simulation, simulate

__all__ = ["Simulation", "simulate"]
