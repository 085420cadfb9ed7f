"""Batches of a script: shared between ranks, with a position, and for evaluation."""
