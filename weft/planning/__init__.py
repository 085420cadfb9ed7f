"""Costs of communication as data: data in, times and decisions out."""
