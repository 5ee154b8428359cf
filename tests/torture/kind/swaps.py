"""Entries of runs that are copied into other runs, or exchanged: commands give the right answer or report it.

There are runs of two seeds, of another version, diverged, interrupted and followed, some with stored removals.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import torch

from ntkexp import load_run
from ntkexp.mistake import Mistake
from ntkexp.records.contributions import Removal, write_removal
from ntkexp.records.kernel_file import open_matrix
from ntkexp.run.folder_listener import FolderListener
from tests.foreign_loop import loops
from tests.torture.kind.damages import broken_off
from tests.torture.kind.kills import promised, undrawn
from tests.torture.stage import SMALL, Ended, Fault, Outcome, Stage, agree, judged

TRAIN = ("train", "--quiet", "--out=outputs", *SMALL)
ADAM = (*TRAIN, "optimizer=adam", "optimizer.step_size=0.05", "steps=8", "checkpoint_seconds=0")
COMMANDS = {
    "secant": TRAIN,
    "seed": (*TRAIN, "seed=1"),
    "diverged": (*TRAIN, "steps=9", "optimizer.step_size=1e9"),
    "adam": ADAM,
    "begun": (*ADAM, "model.width=9"),
    "begun too": (*ADAM, "model.width=9", "seed=1"),
    "earlier": TRAIN,
}
FOLLOWED = ("mine", "mine too")
WITHOUT = ("--without=1,3", "--split=query", "--query=0", "--json")
VOUCHING = ("DONE.json", "BEGUN.json", "progress.json", "provenance.json")
UNTOLD = (".lock", "error.txt")
MARKS = ("damaged", "another run", "was made by", "not finished")
"""Words that report a missing or partial answer."""


def questions(name: str, run: str) -> dict[str, tuple[str, ...]]:
    """Return the commands on a changed run."""
    found = {
        "load_run": ("load_run", run),
        "report": ("report", run, "--format=csv"),
        "explain": ("explain", run, "--split=query", "--query=1", "--json"),
        "without": ("explain", run, *WITHOUT),
        "runs": ("runs", "--json"),
        "resume": ("resume", run, "--quiet"),
    }
    if name in COMMANDS:
        found["tangent"] = ("kernel", "tangent", f"--run={run}", "--out=k.zarr", "--quiet")
    if name in COMMANDS and name != "earlier":
        found["train"] = COMMANDS[name]
    return found


def play(luck: Random, stage: Stage) -> Outcome:
    made = stage.kept("runs", make)
    names: dict[str, str] = json.loads((made / "names.json").read_text("utf-8"))
    name, other = luck.sample(sorted(names), 2)
    asked, words = luck.choice(list(questions(name, names[name]).items()))
    alone = json.loads(
        (stage.kept(f"{name}-{asked}", partial(ask, made, names[name], asked, words)) / "told").read_text()
    )
    stage.copy(made / "outputs", "outputs")
    what = f"{put(luck, stage.folder / names[name], stage.folder / names[other])} ({other} into {name}), {asked}"
    ended = stage.run(*words, command=loaded if asked == "load_run" else undrawn)
    try:
        outcome = judged(ended)
        if outcome == "done":
            compare(answer(stage.folder, names[name], asked, ended), alone, what)
    except Fault as fault:
        raise Fault(f"{what}\n{fault}\n{ended}") from None
    return outcome


def put(luck: Random, here: Path, there: Path) -> str:
    """Copy an entry of another run into this one, or exchange the two. Return a description."""
    way = luck.random()
    if way < 0.12 and "-" in here.name:  # followed loops may have any name
        shutil.rmtree(here)
        shutil.copytree(there, here)
        return "the whole folder is copied over"
    if way < 0.24:
        source, target = luck.sample(VOUCHING, 2)
        if (here / source).is_file():
            shutil.copyfile(here / source, here / target)
        return f"{source} is copied over {target}"
    entries = sorted({entry.name for entry in there.iterdir()} - set(UNTOLD))
    name = luck.choice([*entries, *(["removal"] * 4 if "removal" in entries else [])])
    ours, kept = here / name, here / "kept aside"
    if way < 0.6 and ours.exists():
        ours.rename(kept)
        (there / name).rename(ours)
        kept.rename(there / name)
        return f"{name} is exchanged"
    if ours.is_dir():
        shutil.rmtree(ours)
    (shutil.copytree if (there / name).is_dir() else shutil.copyfile)(there / name, ours)
    return f"{name} is copied"


def answer(folder: Path, run: str, asked: str, ended: Ended) -> dict[str, Any]:
    """Return the answer about the run, or the files of a trained run."""
    if asked in {"train", "resume"}:
        own = {
            file: held.hex() for file, held in promised(folder).items() if file.startswith(f"runs/{Path(run).name}/")
        }
        return {file: held for file, held in own.items() if Path(file).parts[2] != "removal"}  # not promised
    if asked == "runs":
        (found,) = [row for row in json.loads(ended.out) if row["run"] == run]
        return dict(found)
    return {"printed": ended.out, "said": ended.err, "kernel": kernel(folder)}


def compare(found: Mapping[str, Any], alone: Mapping[str, Any], what: str) -> None:
    """Raise a fault unless the answer is right or reports the change."""
    if "state" in found:
        if found["state"] == "done" and found != alone:
            raise Fault(f"{what}: {found['said']}")
    elif "said" in found:
        if not any(mark in found["said"] + found["printed"] for mark in MARKS):
            agree(as_bytes(found), as_bytes(alone), what)
    else:  # foreign files in the folder do not matter
        agree(as_bytes({name: held for name, held in found.items() if name in alone}), as_bytes(alone), what)


def as_bytes(told: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the compared parts, without messages."""
    return {name: str(value).encode() for name, value in told.items() if name != "said"}


def kernel(folder: Path) -> float:
    """Return the sum of a kernel file, or 0."""
    if not (folder / "k.zarr").is_dir():
        return 0.0
    return float(np.abs(open_matrix(folder / "k.zarr").array("ntk")).sum())


def loaded(arguments: Sequence[str]) -> int:
    """Print a run as the library reads it."""
    try:
        run = load_run(arguments[1])
        numbers = {name: float(np.abs(array.to_numpy()).sum()) for name, array in sorted(run.contributions.items())}
        numbers |= {"predictions": float(np.abs(run.predictions.to_numpy()).sum())}
        sys.stdout.write(f"{run.outcome}\n{run.results}\n{run.config.get('seed')}\n{numbers}\n{run.metrics}\n")
    except Mistake as mistake:
        sys.stderr.write(f"ntkexp: {mistake}\n")
        return 2
    return 0


def ask(made: Path, run: str, asked: str, words: Sequence[str], stage: Stage) -> None:
    """Store the answer from unchanged runs, or nothing if the command is refused."""
    stage.copy(made / "outputs", "outputs")
    ended = stage.run(*words, command=loaded if asked == "load_run" else undrawn)
    told = answer(stage.folder, run, asked, ended) if judged(ended) == "done" else {}
    (stage.folder / "told").write_text(json.dumps(told), encoding="utf-8")


def make(stage: Stage) -> None:
    """Make the runs, some removals, and the list of names."""
    runs, names = stage.folder / "outputs" / "runs", dict[str, str]()
    for name, words in COMMANDS.items():
        before = set(runs.iterdir()) if runs.is_dir() else set()
        command = broken_off(undrawn, FolderListener, "on_step", 5) if name.startswith("begun") else undrawn
        ended = stage.run(*words, command=partial(earlier, undrawn) if name == "earlier" else command)
        if not name.startswith("begun") and judged(ended) != "done":
            raise Fault(str(ended))
        (made,) = set(runs.iterdir()) - before
        names[name] = str(made.relative_to(stage.folder))
    for name in ("secant", "seed", "adam"):
        stage.done("explain", names[name], *WITHOUT)
    for number, name in enumerate(FOLLOWED):
        follow(runs / name.replace(" ", "_"), number)
        names[name] = str((runs / name.replace(" ", "_")).relative_to(stage.folder))
    (stage.folder / "names.json").write_text(json.dumps(names), encoding="utf-8")


def earlier(command: Any, arguments: Sequence[str]) -> int:
    """Run the command as an earlier version."""
    with (
        mock.patch("ntkexp.experiment.identity.results_version", 1),
        mock.patch("ntkexp.run.environment.results_version", 1),
    ):
        return int(command(arguments))


def follow(folder: Path, seed: int) -> None:
    """Follow a loop, and store a removal of two examples."""
    given = loops.loop(loops.sgd)
    with torch.no_grad():
        given.x += seed
    loops.followed(given, loops.plain, to=folder).attribute()
    numbers = np.random.default_rng(seed).normal(size=(1, 3, 2))
    places = {"query": (0,), "out": (0, 1, 2), "example": (1, 3)}
    write_removal(
        folder,
        Removal(**places, actual=numbers.sum(2), shares=numbers, by_step=numbers, growth=1.0, repeated=0.0, emptied=0),
    )
