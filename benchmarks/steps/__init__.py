"""One training step, the same for every system: the models, the ways to train them, and the ranks that do it."""
