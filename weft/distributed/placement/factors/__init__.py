"""Sufficient factors: gradients of linear layers as rows of inputs and of output gradients, multiplied on arrival."""
