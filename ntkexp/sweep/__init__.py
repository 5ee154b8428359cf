"""Many experiments: what a sweep is, which of its runs are finished, and how the others are brought to their end."""
