"""The folder of a run: lock, checkpoints, metrics."""
