"""Estimates with intervals, power laws and paired comparisons from several runs.

Each line imports only from the lines above it:

estimate      intervals, fits, comparisons with an expected range
quantities    the numbers of a run, by name
laws          the power laws of a sweep
tables        the tables of a sweep, and the comparison of two sweeps
"""
