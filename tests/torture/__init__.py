"""Torture: bad inputs, kills and damages by the thousand, each from its number, and whatever does not end as promised.

    python -m tests.torture [KIND…] --count=1000 --seed=0 --workers=2

A command ends with what was asked for, or with one line that says why not; a kind is a file in `kind/`.
"""
