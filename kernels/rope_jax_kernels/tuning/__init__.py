"""Calls that are recorded, measured on this device, and served by what was fastest.

`record` notes calls, `measure` compares and times what could serve them, `choices` keeps what was
found. This folder uses `dispatch`; the kernels know nothing of it.
"""
