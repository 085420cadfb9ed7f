"""Level 3: ranks that exchange tensors, and what they do with them."""
