"""Sweeps of many experiments: their definition, their state, and how missing runs are done."""
