"""Tangent and secant kernels of functions of weights: operations are recorded once, then evaluated at least cost."""
