"""Covariances (NNGP kernels) and tangent kernels between the pixels of two examples in
an infinitely wide network, and the operations of layers on them.

Each module imports only from the modules listed before it:

    pairs        pairs of pixels, linear maps between them, and operations of the fused engine
    covariance   covariances and tangent kernels, and distances without cancellation
"""
