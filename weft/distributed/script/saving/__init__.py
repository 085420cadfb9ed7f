"""All of a script's state in a checkpoint, for any number of ranks."""
