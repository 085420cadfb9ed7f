"""From Python code to a graph: recording, tracing, sizes that stay symbolic, layers sized by what reaches them."""
