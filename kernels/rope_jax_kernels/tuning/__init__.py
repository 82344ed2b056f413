"""Calls that are recorded, measured on this device, and served by the fastest candidate.

`record` notes calls, `measure` compares and times the candidates for them, `choices` keeps the
results. This folder uses `dispatch`; the kernels do not depend on it.
"""
