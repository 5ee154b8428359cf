"""Pictures of a run.

Each module has a function `draw(run, canvas)`, which returns a figure, or None if the
run has no data for the picture. The function `table(run)` returns the drawn numbers."""
