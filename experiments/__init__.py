"""Experiments behind the figures of the documentation: `python -m experiments NAME`."""
