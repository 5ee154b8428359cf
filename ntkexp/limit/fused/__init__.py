"""The engine for CPUs: the whole depth on one tile of pixel pairs at a time, compiled by numba at first use."""
