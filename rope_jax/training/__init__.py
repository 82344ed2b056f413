"""Training: setup, step, loop, optimizers, checkpoints, metrics."""
