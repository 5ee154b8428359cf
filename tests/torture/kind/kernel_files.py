"""Kernel files with a damaged file: they are completed and predict as intact ones, or are refused."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from functools import partial
from random import Random

from ntkexp.records.kernel_file import KernelMatrix
from tests.torture.damage import damage
from tests.torture.kind.damages import broken_off
from tests.torture.stage import SMALL, Fault, Outcome, Stage, agree, contents, judged, ntkexp

SIZES = (*SMALL, "data.train=70", "data.query=30", "data.test=45")  # a tile is of 32 points
FILE = "k.zarr"
TILES = {"half": 7, "whole": None}
PREDICT = ("kernel", "predict", FILE, "--quiet", "--ridge=1e-3", "--out=answer")


def play(luck: Random, stage: Stage) -> Outcome:
    kind, state = luck.choice(("limit", "tangent")), luck.choice(list(TILES))
    left_alone, begun, twin = (
        stage.kept(f"{kind}-{seed}-{upto}", partial(fill, kind, seed, TILES[upto]))
        for seed, upto in ((0, "whole"), (0, state), (1, state))
    )
    stage.copy(begun / FILE, FILE)
    done = damage(luck, stage.folder / FILE, twin / FILE)
    asks = state == "whole" and luck.random() < 0.6
    ended = stage.run(*(PREDICT if asks else words(kind, 0)))
    what = f"{state} {kind}, {done}, {'predict' if asks else 'fill'}"
    try:
        if (outcome := judged(ended)) == "done":
            place = "answer" if asks else FILE
            agree(contents(stage.folder / place), contents(left_alone / place), what)
    except Fault as fault:
        raise Fault(f"{what}\n{fault}") from None
    return outcome


def words(kind: str, seed: int) -> Sequence[str]:
    """Return the command that computes a file."""
    return ("kernel", kind, "--quiet", f"--out={FILE}", *SIZES, f"data.seed={seed}")


def fill(kind: str, seed: int, tiles: int | None, stage: Stage) -> None:
    """Compute some tiles of a file, or all tiles and predictions."""
    if tiles is None:
        stage.done(*words(kind, seed))
        stage.done(*PREDICT)
        return
    ended = stage.run(*words(kind, seed), command=broken_off(ntkexp, KernelMatrix, "write", tiles))
    if ended.status != -signal.SIGKILL:
        raise Fault(f"it was to be killed: {ended}")
