"""Loops that users wrote."""
