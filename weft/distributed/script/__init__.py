"""A user's own script on many ranks: its loop stays as it is, `weave` puts the ranks under it.

world          who this process is, and the group in which ranks do what the script asks beside its training
weave          from the script's model, optimizer and loader to replicas
loaders        every rank's share of the batches that rank 0 draws
gradients      averaged during backward, where ranks are synchronous
"""
