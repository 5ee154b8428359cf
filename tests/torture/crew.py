"""Workers: each plays every so manieth case, and tells how it ended."""

from __future__ import annotations

import random
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from pkgutil import iter_modules
from typing import Protocol

from tests.torture import kind as kinds
from tests.torture.stage import FORKS, Fault, Outcome, Stage, cleared


class Kind(Protocol):
    """A file in `kind/`."""

    def play(self, luck: random.Random, stage: Stage) -> Outcome:
        """One case, drawn from the luck it is given; a promise that is broken is a `Fault`."""
        ...


@dataclass(frozen=True)
class Played:
    """How a case ended; what is wrong with it, if anything is."""

    kind: str
    number: int
    outcome: str
    fault: str
    seconds: float


def known() -> list[str]:
    """The kinds there are."""
    return sorted(module.name for module in iter_modules(kinds.__path__))


def load(name: str) -> Kind:
    """A kind by its name."""
    found: Kind = import_module(f"{kinds.__name__}.{name}")
    return found


def played(name: str, seed: int, number: int, shared: Path) -> Played:
    """A case, from its kind, a seed and a number."""
    begun, fault, outcome = time.monotonic(), "", "failed"
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-{number}-", dir=shared))
    own = shared / f"of-{name}"
    own.mkdir(exist_ok=True)
    try:
        outcome = load(name).play(random.Random(f"{name}/{seed}/{number}"), Stage(folder, own))
    except Fault as found:
        fault = str(found)
    except Exception:  # the torture's own fault is one as well
        fault = traceback.format_exc()
    finally:
        cleared(folder)
    return Played(name, number, outcome, fault, time.monotonic() - begun)


def work(cases: Sequence[tuple[str, int]], seed: int, shared: Path, line: Connection) -> None:
    """One worker's share."""
    for name, number in cases:
        line.send(played(name, seed, number, shared))
    line.close()


def all_played(cases: Sequence[tuple[str, int]], seed: int, workers: int) -> Iterator[Played]:
    """Every case, in the order in which they end."""
    with tempfile.TemporaryDirectory(prefix="torture-", ignore_cleanup_errors=True) as folder:
        lines = []
        for worker in range(workers):
            ours, theirs = FORKS.Pipe(duplex=False)
            FORKS.Process(target=work, args=(cases[worker::workers], seed, Path(folder), theirs)).start()
            theirs.close()
            lines.append(ours)
        while lines:
            for line in wait(lines):
                assert isinstance(line, Connection)
                try:
                    yield line.recv()
                except EOFError:
                    lines.remove(line)
