"""Modules that were not written for this program, made to fit, and the trouble that they make."""
