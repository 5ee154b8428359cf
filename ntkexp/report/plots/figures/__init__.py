"""Pictures of a run.

Each module has a function `draw(run)`, which returns a figure,
or None if it does not apply."""
