"""A user's own script on many ranks: its loop stays as it is, `weave` puts the ranks under it.

world          who this process is, and the group in which ranks do what the script asks beside its training
weave          from the script's models, optimizers and loader to replicas (checks: of its arguments; names, seeding)
weaving        what one call of it has made: epochs, the consensus of all ranks (consensus), the end (ends)
loaders        every rank's share of the batches of a loader (feeds: where they come from; order: drawn by rank 0)
evaluation     every rank's block of the data
sharing        every rank's share of a batch made by hand (cutting: along the dim of samples)
shares         how much the batch that was handed out last counts (batch_share: where it is noted)
over_ranks     mean, sum, gather, broadcast (reductions, carrying, trees: how values travel)
saving         checkpoints of all of a script's state (taking, woven, parts, structure: into one; reading, loading: out;
               guard: torch.save by many ranks)
gradients      averaged during backward, where ranks are synchronous (incoming: how much each backward counts)
steps          taken at optimizer.step() under every other plan (torch_updates: the optimizer at shards; losses:
               of closures)
batch_norm     over the samples of all ranks
blocks         no_sync and consensus, for the script
"""
