"""Commands that are killed, once or several times, and then finished have the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from unittest import mock

from tests.torture.stage import SMALL, Command, Ended, Fault, Outcome, Stage, agree, contents, judged, ntkexp

TRAIN = ("train", "--quiet", "--out=outputs", *SMALL, "steps=30", "checkpoint_seconds=0")
STOP = "stop_at_loss=0.17"  # stops early: unused space for kernels is released
COMMANDS = {
    "secant": (*TRAIN, STOP),
    "adam": (*TRAIN, STOP, "optimizer=adam", "optimizer.step_size=0.05"),
    "nesterov": (*TRAIN, "optimizer=nesterov", "path.record=[outputs,weights]"),
    "snapshots": (*TRAIN, STOP, "optimizer=sgd", "optimizer.batch=8", "path.every=snapshots", "path.schedule=adaptive"),
    "flow": (*TRAIN, "optimizer=flow", "steps=5"),
    "drawing": (*TRAIN, "steps=2"),
    "limit": ("kernel", "limit", "--quiet", "--out=outputs/k.zarr", *SMALL, "data.train=250", "data.query=40"),
    "tangent": ("kernel", "tangent", "--quiet", "--out=outputs/k.zarr", *SMALL, "data.train=250", "data.query=40"),
    "sweep": ("sweep", "--quiet", "--out=outputs", "--workers=2", "model.width=8,9", "seed=0..1", *SMALL),
}
RARE = {"sweep": 0.2}  # its workers load torch
UNPROMISED = ("DONE.json", "provenance.json", "timings.csv", "progress.json", "journal.jsonl", ".lock", "weights.pt")


def undrawn(arguments: Sequence[str]) -> int:
    """Run the command without pictures, which would take longer than the run."""
    with mock.patch("ntkexp.run.execute.draw_run", no_pictures):
        return ntkexp(arguments)


def no_pictures(folder: Path) -> dict[str, str]:
    """Draw nothing."""
    return {}


def play(luck: Random, stage: Stage) -> Outcome:
    name = luck.choices(list(COMMANDS), [RARE.get(name, 1.0) for name in COMMANDS])[0]
    words, command = COMMANDS[name], ntkexp if name in {"drawing", "sweep"} else undrawn
    left_alone = stage.kept(name, lambda kept: finish(kept, words, command))
    seconds = float((left_alone / "seconds").read_text())
    for _ in range(luck.choice((1, 1, 1, 2, 3))):
        ended = stage.killed(words, luck.uniform(0, seconds), command)
        if ended.status != -9:
            judged(ended)
    finish(stage, words, command)
    agree(promised(stage.folder), promised(left_alone), f"{name} after a kill")
    return "done"


def finish(stage: Stage, words: Sequence[str], command: Command) -> None:
    """Run the command, and write its seconds."""
    ended: Ended = stage.run(*words, command=command)
    if judged(ended) != "done":
        raise Fault(str(ended))
    (stage.folder / "seconds").write_text(str(ended.seconds))


def promised(folder: Path) -> dict[str, bytes]:
    """Return the outputs without files that contain times or archives of torch."""
    return {name: held for name, held in contents(folder / "outputs").items() if Path(name).name not in UNPROMISED}
