"""A user's own script on many ranks: its loop stays as it is, `weave` puts the ranks under it.

observation    what a script does, as events, for the commands that prove, simulate and profile it
world          who this process is, the group in which ranks do what the script asks, and whether they are in step
calls          means, sums, gathers over the world
data           every rank's share of the batches that rank 0 draws, and of an evaluation
weaving        gradients averaged in backward, steps of every other plan, the consensus of ranks
saving         checkpoints

Each imports those above it.
"""
