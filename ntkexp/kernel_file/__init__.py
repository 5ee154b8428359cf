"""A kernel in a file, computed tile by tile, and predictions from it.

In reading order: `kernel` (which kernel, and its blocks), `fill` (computing the file), `predict`.
"""
