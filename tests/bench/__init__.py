"""How fast kernels are read, against the plain ways of doing the same: `python -m tests.bench`."""
