"""A kernel in a file, computed tile by tile, and predictions from it."""
