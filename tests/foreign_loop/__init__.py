"""Loops that somebody else wrote."""
