"""One run: its setting, its steps, its results and its folder."""
