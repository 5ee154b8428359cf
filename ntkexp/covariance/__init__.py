"""Covariances and tangent kernels between the pixels of two examples, and the
operations that layers apply to these.

Each module imports only from the modules listed before it:

    pairs        pairs of pixels, linear maps between them, and operations on tiles
    covariance   covariances and tangent kernels, and distances without cancellation
"""
