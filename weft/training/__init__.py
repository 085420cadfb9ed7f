"""Level 2: data sets, samplers, optimizers, schedules, models, and the loop that drives them."""
