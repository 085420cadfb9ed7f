"""Splits of a model, measured against their cost formulas and against peers."""
