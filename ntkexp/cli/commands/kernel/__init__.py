"""Compute a kernel into a file, and predict with it."""
