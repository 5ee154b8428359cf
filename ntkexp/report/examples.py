"""What a run says of its examples: which class or values they have, and when they are learned, in names for readers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ntkexp.report.run import Run
from ntkexp.text import listed, printable, short, shown_name

FEW = 8  # numbers of a row that are shown
PHASE_CLASSES = "phase_classes"


@dataclass(frozen=True)
class Example:
    """An example of the data has a number in the source, is of a class or has values, and looks like this; `text` is
    what it says, where it has no target, and `phase`, counted from 1, when it was learned, where there are phases.
    """

    index: int
    name: str
    shown: NDArray[np.generic]
    text: str | None = None
    phase: int | None = None

    @property
    def label(self) -> str:
        """It goes by its name, and by its phase, if it has one."""
        return self.name if self.phase is None else f"{self.name}, phase {self.phase}"


def output_name(run: Run, out: int, outputs: int, phase: int | None = None) -> str:
    """Name the output that is explained: f, that of a class, as its phase calls it, or one of several by its place."""
    classes = run.data["classes"]
    if not 1 < outputs == len(classes):
        return f"f[{out}]" if outputs > 1 else "f"
    return f"f for {class_name(run, out, phase)}"


def sharing(run: Run, out: int, outputs: int) -> str:
    """Say what an output is for in each phase, where phases share the outputs."""
    if PHASE_CLASSES not in run.data:
        return ""
    here = [
        listed([f"{shown_name(name)} in phase {number}" for number, name in enumerate(names, start=1)])
        for names in run.data[PHASE_CLASSES].T.tolist()
    ]
    return f"this output is for {here[out]}" if outputs > 1 else f"above 0, f is for {here[1]}; below, for {here[0]}"


def phase_of(run: Run, split: str, number: int) -> int | None:
    """Find the phase that an example of a split is of, counted from 1, where there are phases."""
    found = run.data.get(f"{split}_phase")
    return None if found is None else int(found[number])


def class_name(run: Run, target: int, phase: int | None) -> str:
    """Name a class as its phase does, where phases share the outputs."""
    shared = run.data.get(PHASE_CLASSES)
    return shown_name(
        str(run.data["classes"][target] if phase is None or shared is None else shared[phase - 1, target])
    )


def example(run: Run, split: str, number: int) -> Example:
    """Read one example of a split."""
    if f"{split}_name" in run.data:
        return followed_example(run, split, number)
    target, phase = run.data[f"{split}_target"][number], phase_of(run, split, number)
    values = " ".join(short(float(value)) for value in np.atleast_1d(target))
    name = class_name(run, target, phase) if len(run.data["classes"]) else values
    return Example(int(run.data[f"{split}_index"][number]), name, run.data[f"{split}_shown"][number], phase=phase)


def followed_example(run: Run, split: str, number: int) -> Example:
    """Read an example of a loop that was followed: it has a name, and its text or numbers in place of a target."""
    row, name = run.data[f"{split}_shown"][number], shown_name(str(run.data[f"{split}_name"][number]))
    if f"{split}_text" in run.data:
        words = str(run.data[f"{split}_text"][number]).split()
        return Example(number, name, row, " ".join(map(printable, words)))
    some = " ".join(short(float(value)) for value in row[:FEW]) if row.ndim == 1 else ""
    return Example(number, name, row, f"{some} …" if some and len(row) > FEW else some)
