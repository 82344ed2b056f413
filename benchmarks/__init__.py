"""Measurements behind the project's claims: `python -m benchmarks NAME [...]` runs the `main` of benchmarks.NAME."""
