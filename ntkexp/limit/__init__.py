"""Kernels of infinitely wide networks. They are computed block by block, with torch or
with a fused engine for CPUs.

Each module imports only from the modules listed before it:

    network           the network, and the engine in torch
    fused             the engine for CPUs
    near              pairs of nearly equal examples
    infinite_kernel   the choice of an engine, and the public functions
"""
