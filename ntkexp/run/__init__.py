"""One run: from its setting through its steps to its outcome, and the folder in which it is kept."""
