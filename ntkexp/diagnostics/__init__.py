"""What matrices and patterns of a run say in numbers."""
