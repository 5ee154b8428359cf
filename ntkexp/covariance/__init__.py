"""Covariances and tangent kernels between the pixels of two examples, and the operations of layers
on them.

Each line imports only from the lines above it:

    pairs        pairs of pixels, linear maps between them, and operations on tiles
    covariance   covariances and tangent kernels, and distances without cancellation
"""
