"""Sketches: Jacobians projected at random, for kernels whose features would not fit."""
