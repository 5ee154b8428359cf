"""Readings: the kernel of a function is read the cheapest way that is right, or the way is refused."""
