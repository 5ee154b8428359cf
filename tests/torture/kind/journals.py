"""Sweeps of which a file is damaged before somebody looks, or they are given again: as if left alone, or a refusal."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random

from tests.torture.damage import damage
from tests.torture.kind.kills import promised
from tests.torture.stage import SMALL, Fault, Outcome, Stage, agree, judged

SWEEP = ("sweep", "--quiet", "--out=outputs", "--workers=2", "model.width=8,9", *SMALL)
FORMS = ("csv", "md", "json")
FOR_READERS = (".lock", ".runs.csv", ".points.csv", ".laws.csv")
"""What no command reads."""


def play(luck: Random, stage: Stage) -> Outcome:
    made, other = (stage.kept(f"made-{seed}", partial(make, seed)) for seed in (0, 1))
    words = luck.choice(asked(made))
    left_alone = stage.kept(f"told-{words[-1]}", partial(ask, made, words))
    sweeps = stage.copy(made / "outputs", "outputs") / "sweeps"
    for_readers = tuple(file.name for file in sweeps.iterdir() if file.name.endswith(FOR_READERS))
    what = f"{damage(luck, sweeps, other / 'outputs' / 'sweeps', for_readers)}, {words[0]} {words[-1]}"
    try:
        ended = stage.run(*words)
        if (outcome := judged(ended)) == "done":
            agree(answer(stage.folder, ended.out), answer(left_alone, (left_alone / ".out").read_text("utf-8")), what)
    except Fault as fault:
        raise Fault(f"{what}\n{fault}") from None
    return outcome


def make(seed: int, stage: Stage) -> None:
    """A sweep that is done."""
    stage.done(*SWEEP, f"seed={seed}")


def asked(made: Path) -> Sequence[tuple[str, ...]]:
    (record,) = (made / "outputs" / "sweeps").glob("*.json")
    return (*SWEEP, "seed=0"), *(("report", record.stem, f"--format={form}") for form in FORMS)


def ask(made: Path, words: Sequence[str], stage: Stage) -> None:
    """The answer from a sweep that is whole."""
    stage.copy(made / "outputs", "outputs")
    stage.done(*words)


def answer(folder: Path, printed: str) -> dict[str, bytes]:
    """What was printed, and what outputs there are."""
    found = {name: held for name, held in promised(folder).items() if not name.endswith(FOR_READERS)}
    return {"printed": printed.encode()} | found
