"""provenance.json: which program made a run, by which command, and where.

Every change of `results_version` may move numbers, or what they are called: a run is read by the version that made it.
"""

from __future__ import annotations

from pathlib import Path

from ntkexp.mistake import Mistake
from ntkexp.records.folder import RunFolder
from ntkexp.records.version import package_version, results_version

PROVENANCE = "provenance.json"


class OtherVersion(Mistake):
    """A run was made by another version than this."""


def refuse_other_version(run: Path) -> None:
    """A run that another version made is of no use to this one; one that cannot tell is judged by its other files."""
    try:
        made = RunFolder(run).read_sealed(PROVENANCE)
    except Mistake:
        return
    if made.get("results_version") != results_version:
        by = version_of(made.get("ntkexp"), made.get("results_version"))
        this = version_of(package_version(), results_version)
        raise OtherVersion(f"{run} was made by {by}, and this is {this}; `{made.get('command')}` runs it anew")


def version_of(package: object, results: object) -> str:
    """Spell a version in words.

    >>> version_of("0.1.0", 4)
    'ntkexp 0.1.0 with results_version 4'
    """
    return f"ntkexp {package} with results_version {results}"
