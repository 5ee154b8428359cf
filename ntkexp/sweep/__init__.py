"""Sweeps of many experiments: define a sweep, plan its runs,
and carry out the missing runs.

Each module imports only from the modules listed before it:

definition     axes, seeds and fits, from a file or a command line
plan           the composed runs, their states and estimated costs, and the event log
jobs           carry out runs as jobs on an engine, with progress and remaining time
"""
