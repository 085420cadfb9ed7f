"""Ranks that exchange tensors: one interface, many transports."""
