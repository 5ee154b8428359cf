"""Every option and argument that names a file or folder, with odd paths."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

from tests.torture.damage import WORDS, letters
from tests.torture.stage import SMALL, Outcome, Stage

POINTS = ("data.train=4", "data.query=2", "data.test=2")
COMMANDS = (
    ("train", "--quiet", *SMALL, "--out={place}"),
    ("train", "--quiet", *SMALL, "--config-dir={place}"),
    ("train", "--quiet", *SMALL, "--trust={place}"),
    ("train", "--quiet", *SMALL, "data=table", "data.target=y", "data.path={place}"),
    ("train", "--quiet", *SMALL, "data=text", "model=transformer", "data.path={place}"),
    ("train", "--quiet", *SMALL, "data=mnist", "data.path={place}"),
    ("train", "--quiet", *SMALL, "data=cifar10", "data.path={place}"),
    ("train", "--quiet", *SMALL, "model=module", "model.path={place}"),
    ("train", "--quiet", *SMALL, "model=huggingface", "model.path={place}"),
    ("config", "--cost", "--config-dir={place}"),
    ("sweep", "{place}", "--dry-run"),
    ("sweep", "width", "--dry-run", "--out={place}"),
    ("sweep", "width", "--dry-run", "--config-dir={place}"),
    ("sweep", "width", "--quiet", "--engine=dask:{place}"),
    ("claims", "{place}", "--quiet"),
    ("claims", "linear", "--quick", "--quiet", "--config-dir={place}"),
    ("resume", "{place}", "--quiet"),
    ("runs", "--out={place}"),
    ("report", "{place}"),
    ("report", "{run}", "--out={place}"),
    ("report", "{run}", "--format=csv", "--out={place}"),
    ("explain", "{place}"),
    ("explain", "{run}", "--picture={place}"),
    ("explain", "{run}", "--picture={place}.svg"),
    ("explain", "{run}", "--without=1", "--again={place}"),
    ("compare", "{place}", "{run}"),
    ("attribute", "{place}", "--model={place}:f"),
    ("kernel", "limit", "--quiet", *POINTS, "--out={place}"),
    ("kernel", "tangent", "--quiet", "--run={place}"),
    ("kernel", "tangent", "--quiet", "--run={run}", "--out={place}/k.zarr"),
    ("kernel", "predict", "{place}"),
    ("kernel", "study", "{place}", "--quiet"),
    ("kernel", "ensemble", "--quiet", *SMALL, "--networks=2", "--out={place}"),
)
ELSEWHERE = ("/proc/x", "/proc/x/y", "/proc/self/fd/99", "/sys/x", "/dev/null/x", "/dev/zero", "/dev/urandom", "")
NAMES = (
    *ELSEWHERE,
    *WORDS,
    "d/" * 2000 + "x",
    "a" * 300,
    *(f"{name}{end}" for name in "fgilpuz" for end in ("", "/x")),
)
ENDINGS = ("", "", ".csv", ".py", ".json", ".yaml", ".zarr")


def play(luck: Random, stage: Stage) -> Outcome:
    run = next((stage.kept("run", lambda other: other.done("train", "--quiet", *SMALL)) / "outputs/runs").iterdir())
    ending = luck.choice(ENDINGS)
    fill(stage.folder, ending)
    place = luck.choice((*NAMES, letters(luck))).replace("\0", "") + ending
    if harmful(place):
        place = "x"
    return stage.outcome(*(word.format(place=place, run=run) for word in luck.choice(COMMANDS)))


def fill(folder: Path, ending: str) -> None:
    """Make a pipe, dangling and circular links, a device, a foreign file, and a folder of pipes."""
    os.mkfifo(folder / f"p{ending}")
    (folder / f"l{ending}").symlink_to(folder / f"l{ending}")
    (folder / f"g{ending}").symlink_to(folder / "nowhere" / "at all")
    (folder / f"z{ending}").symlink_to("/dev/zero")
    (folder / f"f{ending}").write_bytes(b"\xff\0=1\n")
    (folder / f"u{ending}").mkdir()
    for name in ("config.yaml", "config.json", "DONE.json", "train-images-idx3-ubyte", "data_batch_1", "zarr.json"):
        os.mkfifo(folder / f"u{ending}" / name)


def harmful(place: str) -> bool:
    """Return true if a command could write outside the folder of the case."""
    return not place.startswith(ELSEWHERE[:-1]) and (place.startswith(("/", "~")) or ".." in Path(place).parts)
