"""One training step in one process, the same for every system: models, ways to run them, and workers that do it."""
