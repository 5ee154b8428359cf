"""Unfinished runs with a damaged file are resumed to the same bytes, or refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from unittest import mock

from ntkexp.run.folder_listener import FolderListener
from tests.torture.damage import damage
from tests.torture.kind.kills import COMMANDS, promised, undrawn
from tests.torture.stage import Command, Fault, Outcome, Stage, agree, judged

MOMENTS = {
    "secant": [("on_step", 9)],
    "adam": [("on_step", 4), ("on_step_back", 3), ("on_end", 1)],
    "snapshots": [("on_step", 12), ("on_end", 1)],
    "flow": [("on_step", 3)],
}
"""The method and the number of its call after which a run is killed."""


def play(luck: Random, stage: Stage) -> Outcome:
    name = luck.choice(list(MOMENTS))
    method, call = luck.choice(MOMENTS[name])
    words = COMMANDS[name]
    left_alone = stage.kept(name, partial(whole, words))
    begun, twin = (
        stage.kept(f"{name}-{method}{len(seed)}", partial(begin, (*words, *seed), method, call))
        for seed in ((), ("seed=1",))
    )
    stage.copy(begun / "outputs", "outputs")
    run = only_run(stage.folder)
    done = damage(luck, run, only_run(twin))
    again = words if luck.random() < 0.7 else ("resume", f"outputs/runs/{run.name}", "--quiet")
    return judged_again(stage, again, left_alone, f"{name} at {method} {call}, {done}, {again[0]}")


def judged_again(stage: Stage, again: Sequence[str], left_alone: Path, what: str) -> Outcome:
    """Run the command again. Return its outcome."""
    ended = stage.run(*again, command=undrawn)
    try:
        if (outcome := judged(ended)) == "done":
            agree(promised(stage.folder), promised(left_alone), what)
    except Fault as fault:
        raise Fault(f"{what}\n{fault}") from None
    return outcome


def whole(words: Sequence[str], stage: Stage) -> None:
    """Run without interruption."""
    ended = stage.run(*words, command=undrawn)
    if judged(ended) != "done":
        raise Fault(str(ended))


def begin(words: Sequence[str], method: str, call: int, stage: Stage) -> None:
    """Run, and kill the run after the n-th call of a method."""
    ended = stage.run(*words, command=broken_off(undrawn, FolderListener, method, call))
    if ended.status != -signal.SIGKILL:
        raise Fault(f"it was to be killed: {ended}")


def broken_off(command: Command, owner: type, method: str, call: int) -> Command:
    """Return a command that kills itself after the n-th call of a method."""

    def broken(arguments: Sequence[str]) -> int:
        told: Callable[..., None] = getattr(owner, method)
        calls = count(1)

        def last(*about: object) -> None:
            told(*about)
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)

        with mock.patch.object(owner, method, last):
            return command(arguments)

    return broken


def only_run(folder: Path) -> Path:
    (found,) = (folder / "outputs" / "runs").iterdir()
    return found
