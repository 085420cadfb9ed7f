"""The ranks that run a script: a group of their own, and whether they are all in the same call."""
