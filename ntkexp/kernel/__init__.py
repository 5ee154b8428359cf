"""Kernels of functions of weights, tangent or secant: recorded once, then read as cheaply as is right."""
