"""Kernels of infinitely wide networks, block by block, by torch or by an engine that is fused for CPUs."""
