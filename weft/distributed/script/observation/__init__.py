"""A script as events: who sees them, the trace of its first steps, and what a command changes in it."""
