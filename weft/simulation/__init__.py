"""The virtual cluster as an instrument: trainings on many ranks, real mathematics in virtual time."""

from weft.simulation.simulate import Simulation, simulate

__all__ = ["Simulation", "simulate"]
