"""Benchmarks of speed and memory: `python -m benchmarks NAME [...]` runs benchmarks.NAME.run."""
