"""Experiments whose results the documentation shows: `python -m experiments NAME`."""
