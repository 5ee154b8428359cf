"""KIND[:WHERE] → an engine; those that need an extra are imported when they are asked for.

>>> choose("local", 2)
Local(count=2)
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

from ntkexp.engine.base import AbstractEngine, WrongEngine
from ntkexp.mistake import nearest

HOMES = {
    "local": "ntkexp.engine.local",
    "dask": "ntkexp.engine.dask_cluster",
    "slurm": "ntkexp.engine.slurm",
}
SPELLINGS = "local, dask:ADDRESS, dask:scheduler.json or slurm:KEY=VALUE,…"


class Opener(Protocol):
    """What a module of an engine offers as `open_engine`."""

    def __call__(self, where: str, workers: int | None) -> AbstractEngine: ...


def choose(given: str, workers: int | None) -> AbstractEngine:
    """Open the engine that was asked for."""
    kind, _, where = given.partition(":")
    if kind not in HOMES:
        raise WrongEngine(f"{given}: it takes {SPELLINGS}{nearest(kind, HOMES)}")
    try:
        opener: Opener = import_module(HOMES[kind]).open_engine
    except ModuleNotFoundError as error:
        lacking = f"{kind} needs {error.name}; `pip install 'ntkexp[{kind}]'` brings it"
        raise WrongEngine(lacking) from None
    return opener(where, workers)
