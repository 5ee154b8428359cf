"""A kernel by itself: computed tile by tile into a file, with which targets are predicted."""
