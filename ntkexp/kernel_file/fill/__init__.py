"""A kernel file is filled, tile by tile."""
