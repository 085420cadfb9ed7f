"""A module and its loss made runnable: the executor seam, and what implements it in PyTorch."""
