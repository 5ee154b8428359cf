"""Kernels of infinitely wide networks, computed block by block with torch or a fused engine for CPUs.

In reading order: `network` (the network, and the engine in torch), `near` (pairs of nearly equal examples),
`fused` (the engine for CPUs), `infinite_kernel` (the choice of an engine, and the public functions).
"""
