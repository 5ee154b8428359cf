"""One file per picture, with a function `draw(run)` that gives a figure, or None where the question does not arise."""
