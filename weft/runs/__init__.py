"""A run from its job to its record: what is trained, on which ranks, and how its progress is shown."""
