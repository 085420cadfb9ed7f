"""A graph made runnable: generated Python, a tape that times each operator, and the first operator that differs."""
