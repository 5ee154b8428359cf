"""Covariances between the pixels of two examples, and the operations of layers on them at infinite
width.
"""
