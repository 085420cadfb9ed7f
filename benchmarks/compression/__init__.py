"""Compression on real slow links: steps of Weft's plans and of DDP with its hooks, on four hosts of one rank each."""
