"""Torture: thousands of random kills and damages. Each case is reproduced from its number.

    python -m tests.torture [KIND…] --count=1000 --seed=0 --workers=2

A command ends with its result, or with one line that gives the reason. A kind is a file in `kind/`.
"""
