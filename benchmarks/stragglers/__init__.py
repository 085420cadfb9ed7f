"""Programs of ranks of which one is three times as slow as the others."""
