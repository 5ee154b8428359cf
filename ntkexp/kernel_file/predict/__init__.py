"""Targets are predicted from a kernel file."""
