"""Which program wrote a number.

`results_version` counts the changes that can move a result: it belongs to the identity of a run, so that a run of an
earlier program is never taken for one of this.
"""

from __future__ import annotations

results_version = 11


def package_version() -> str:
    """Look up the version of the installed package, which is slow, so it is asked for only where it is shown."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415  a third of the start-up time

    try:
        return version("ntkexp")
    except PackageNotFoundError:
        return "0 (not installed)"
