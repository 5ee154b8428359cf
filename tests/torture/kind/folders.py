"""Finished runs with a damaged file: commands give the right answer, compute it again, or report the damage."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random

from tests.torture.damage import damage
from tests.torture.kind.kills import COMMANDS, promised, undrawn
from tests.torture.stage import Ended, Fault, Outcome, Stage, agree, contents, judged

NAMES = ("secant", "adam")
ANSWER = "answer"
REDOING = ("train", "resume")
SAID = ("damaged", "left out")
"""Words that report a damaged or omitted run."""


def questions(name: str, run: str, other: str) -> dict[str, tuple[str, ...]]:
    """Return the commands on two runs. The first may be damaged. Written files go to `answer`."""
    return {
        "train": (*COMMANDS[name], "seed=0"),
        "resume": ("resume", run, "--quiet"),
        "text": ("report", run, other, "--format=text"),
        "csv": ("report", run, other, "--format=csv"),
        "page": ("report", run, other, f"--out={ANSWER}"),
        "runs": ("runs", "--json"),
        "compare": ("compare", run, other),
        "explain": ("explain", run, "--worst=2", f"--picture={ANSWER}/explained.svg"),
        "tangent": ("kernel", "tangent", f"--run={run}", f"--out={ANSWER}/k.zarr", "--quiet"),
    }


def play(luck: Random, stage: Stage) -> Outcome:
    name = luck.choice(NAMES)
    made = stage.kept(name, partial(make, name))
    run, other = (made / "names").read_text("utf-8").split()
    asked, words = luck.choice(list(questions(name, run, other).items()))
    left_alone = stage.kept(f"{name}-{asked}", partial(ask, made, words))
    stage.copy(made / "outputs", "outputs")
    what = f"{name}, {damage(luck, stage.folder / run, made / other)}, {asked}"
    try:
        ended = stage.run(*words, command=undrawn)
        outcome = judged(ended)
        if outcome == "done" and asked in REDOING:
            agree(promised(stage.folder), promised(made), what)
        elif outcome == "done" and not any(word in ended.out + ended.err for word in SAID):
            agree(answer(stage.folder, ended), contents(left_alone / "told"), what)
    except Fault as fault:
        raise Fault(f"{what}\n{fault}") from None
    return outcome


def make(name: str, stage: Stage) -> None:
    """Make two runs, and write their names."""
    for seed in (0, 1):
        ended = stage.run(*COMMANDS[name], f"seed={seed}", command=undrawn)
        if judged(ended) != "done":
            raise Fault(str(ended))
    runs = sorted((stage.folder / "outputs" / "runs").iterdir(), key=lambda run: run.name.split("-")[-2])
    names = [str(run.relative_to(stage.folder)) for run in runs]
    (stage.folder / "names").write_text("\n".join(names), encoding="utf-8")


def ask(made: Path, words: Sequence[str], stage: Stage) -> None:
    """Store the answer from intact runs."""
    stage.copy(made / "outputs", "outputs")
    ended = stage.run(*words, command=undrawn)
    if judged(ended) != "done":
        raise Fault(str(ended))
    for name, content in answer(stage.folder, ended).items():
        place = stage.folder / "told" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)


def answer(folder: Path, ended: Ended) -> dict[str, bytes]:
    """Return the printed text and the written files."""
    return {"printed": ended.out.encode()} | contents(folder / ANSWER)
