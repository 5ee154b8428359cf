"""Pictures of a sweep.

Each module has a function `draw(analysis, runs)`, which yields figures with their data.
"""
