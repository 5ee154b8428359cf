"""Kernels of infinitely wide networks, block by block, with torch or with a fused engine for CPUs."""
