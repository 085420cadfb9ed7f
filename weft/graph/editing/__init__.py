"""Graphs from graphs: operators added and removed by hand, gradients and outputs added by tracing again."""
