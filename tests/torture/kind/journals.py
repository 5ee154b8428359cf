"""Sweeps with a damaged file: commands give the right answer, or are refused."""

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
"""Files that no command reads."""


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
    """Run a sweep."""
    stage.done(*SWEEP, f"seed={seed}")


def asked(made: Path) -> Sequence[tuple[str, ...]]:
    (record,) = (made / "outputs" / "sweeps").glob("*.json")
    return (*SWEEP, "seed=0"), *(("report", record.stem, f"--format={form}") for form in FORMS)


def ask(made: Path, words: Sequence[str], stage: Stage) -> None:
    """Store the answer from an intact sweep."""
    stage.copy(made / "outputs", "outputs")
    stage.done(*words)


def answer(folder: Path, printed: str) -> dict[str, bytes]:
    """Return the printed text and the outputs."""
    found = {name: held for name, held in promised(folder).items() if not name.endswith(FOR_READERS)}
    return {"printed": printed.encode()} | found
