"""The fused engine for CPUs: all layers on one tile of pixel pairs at a time, compiled by numba.

In reading order: `program` (layers as operations on tiles), `functions` (compilation, and polynomials),
`tile` (the operations), `images` (all pixels and offsets of images), `run` (threads, and vectors).
"""
