"""Intervals, rank correlations, power laws and paired comparisons from several runs.

Each module imports only from the modules listed before it:

estimate            intervals, comparisons with an expected range
rank_correlation    Spearman's correlation
power_law           fits of y = c·xᵅ, with an interval for the exponent
quantities          the numbers of a run, by name
laws                the power laws of a sweep
tables              the tables of a sweep, and the comparison of two sweeps
"""
