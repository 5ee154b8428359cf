"""Sweeps of many experiments: their definition, their plan, and carrying out missing runs.

Each file imports only from the files above it:

definition     axes, seeds and fits, from a file or a command line
plan           all runs composed, their states and costs, and the journal
jobs           the runs as jobs on an engine, with progress and remaining time
"""
