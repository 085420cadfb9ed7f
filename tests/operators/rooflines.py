"""A roofline with round numbers, for tests that must not depend on the machine."""

from weft.operators.roofline import Ceiling, Peak, Roofline

ROUND = Roofline(
    num_threads=1,
    frequency=2e9,
    vector_bytes=32,
    ceilings=(Ceiling("L1", 1000, 100e9), Ceiling("L2", 100_000, 50e9), Ceiling("DRAM", None, 10e9)),
    peaks={"float32": Peak(60e9, 64e9), "float64": Peak(30e9, 32e9)},
)
