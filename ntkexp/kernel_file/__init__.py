"""A kernel in a file, computed tile by tile, and predictions from it.

Each line imports only from the lines above it:

    kernel    which kernel it is, and its blocks
    fill      computing the tiles, and estimates of the remaining work
    predict   solvers, predictions and scores
"""
