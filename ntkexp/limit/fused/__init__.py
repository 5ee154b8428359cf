"""The fused engine for CPUs: all layers on one tile of pixel pairs at a time, compiled by numba.

Each line imports only from the lines above it:

    program     layers as operations on tiles, and tables for compiled loops
    functions   compilation, loops over flat arrays, and fast functions
    tile        the operations on a tile
    images      pixels in a tile, coarser levels, and the loop over offsets
    run         vectors, sub-blocks on threads, and the remaining layers
"""
