"""Workers play the cases one after another, and report the outcomes."""

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
        """Draw and play a case. Raise a `Fault` if a promise is broken."""
        ...


@dataclass(frozen=True)
class Played:
    """The outcome of a case, and its fault."""

    kind: str
    number: int
    outcome: str
    fault: str
    seconds: float


def known() -> list[str]:
    """Return the names of all kinds."""
    return sorted(module.name for module in iter_modules(kinds.__path__))


def load(name: str) -> Kind:
    """Load a kind."""
    found: Kind = import_module(f"{kinds.__name__}.{name}")
    return found


def played(name: str, seed: int, number: int, shared: Path) -> Played:
    """Play the case of a kind with a seed and a number."""
    begun, fault, outcome = time.monotonic(), "", "failed"
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-{number}-", dir=shared))
    own = shared / f"of-{name}"
    own.mkdir(exist_ok=True)
    try:
        outcome = load(name).play(random.Random(f"{name}/{seed}/{number}"), Stage(folder, own))
    except Fault as found:
        fault = str(found)
    except Exception:  # a bug of the torture is a fault too
        fault = traceback.format_exc()
    finally:
        cleared(folder)
    return Played(name, number, outcome, fault, time.monotonic() - begun)


def work(cases: Sequence[tuple[str, int]], seed: int, shared: Path, line: Connection) -> None:
    """Play the cases of one worker."""
    for name, number in cases:
        line.send(played(name, seed, number, shared))
    line.close()


def all_played(cases: Sequence[tuple[str, int]], seed: int, workers: int) -> Iterator[Played]:
    """Yield all cases as they end."""
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
