"""Matrices and patterns of a run are measured: spectra, alignment, what contributions add up to."""
