"""Calls that loops make on all ranks: means, sums, gathers, and how values travel for them."""
