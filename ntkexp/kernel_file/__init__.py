"""Kernel files: kernel matrices that are computed and stored tile by tile (a tile is a
block of rows and columns), and their predictions.

Each module imports only from the modules listed before it:

    kernel    definition and identity of a kernel, and its blocks
    fill      compute the tiles of a file, and estimate the remaining work
    predict   solvers, predictions and scores
"""
