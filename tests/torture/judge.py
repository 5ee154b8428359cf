"""What a command promises: what was asked for and status 0, or one line that says why not and status 2.

>>> judged(Ended(("train", "seed=-1"), 2, "", "ntkexp: seed=-1: it takes a whole number ≥ 0\\n", 0.1))
'refused'
>>> judged(Ended(("train",), 1, "", "Traceback (most recent call last):\\nKeyError: 0\\n", 0.1))
Traceback (most recent call last):
tests.torture.judge.Fault: ntkexp train: status 1
Traceback (most recent call last):
KeyError: 0
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal, TypeAlias

Outcome: TypeAlias = Literal["done", "refused"]
OURS = "ntkexp: "
LOST = (" is damaged", " was left without a checkpoint; ")
"""A quiet command says one thing on its way: what work was lost."""
SHOWN = 1200  # characters of a complaint


class Fault(AssertionError):
    """A command that did not keep its promise."""


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it printed; a status below zero is the signal that it died of."""

    arguments: tuple[str, ...]
    status: int
    out: str
    err: str
    seconds: float

    def __str__(self) -> str:
        tail = self.err if len(self.err) <= SHOWN else f"…{self.err[-SHOWN:]}"
        line = shlex.join(["ntkexp", *self.arguments])
        shown = line if len(line) <= SHOWN else f"{line[:SHOWN]}…"
        return f"{shown}: status {self.status}\n{tail}".rstrip()


def judged(ended: Ended) -> Outcome:
    """What became of a command that was to be quiet; anything but its two good ends is a fault."""
    lines = ended.err.split("\n")[:-1] if ended.err.endswith("\n") else ended.err.split("\n")
    if ended.status == 2 and len(lines) == 1 and lines[0].startswith(OURS) and len(lines[0]) > len(OURS):
        return "refused"
    if ended.status == 0 and all(line.startswith(OURS) or is_of_lost_work(line) for line in lines if line):
        return "done"
    raise Fault(str(ended))


def is_of_lost_work(line: str) -> bool:
    """Whether a line says that a run begins anew, and why.

    >>> is_of_lost_work("outputs/runs/a was left without a checkpoint; the run begins anew")
    True
    """
    return any(reason in line for reason in LOST)


def agree(found: dict[str, bytes], expected: dict[str, bytes], what: str) -> None:
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise Fault(f"{what}: {name} {'is missing' if name not in found else 'has other bytes'}")
