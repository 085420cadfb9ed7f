"""From a script's models, optimizers and loader to replicas: gradients, steps, consensus."""
