"""Covariances between the pixels of two examples, and what layers do to them at infinite width."""
