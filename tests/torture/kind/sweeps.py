"""Command lines of sweeps with odd axes, ranges and seeds."""

from __future__ import annotations

from random import Random

from tests.torture.damage import CHOICES, NUMBERS, aimed, letters, misspelt, value
from tests.torture.stage import SMALL, Outcome, Stage

OPTIONS = (
    *("--workers=0", "--workers=1e9", "--engine=lokal", "--engine=local:x", "--engine=slurm:a", "--engine=dask:"),
    *("--out=", "--out=", "--trust=x.py", "--config-dir=/dev/null", "--out=/dev/null/x", "--fail-fast", "--json"),
)


def play(luck: Random, stage: Stage) -> Outcome:
    name = [luck.choice((*CHOICES.options("sweep"), misspelt("width", luck)))] if luck.random() < 0.3 else []
    words = [word for _ in range(luck.choice((1, 1, 2, 3))) for word in axis(luck)]
    option = [luck.choice(OPTIONS)] if luck.random() < 0.15 else []
    return stage.outcome("sweep", *name, "--dry-run", *SMALL, *words, *option)


def axis(luck: Random) -> list[str]:
    """Draw a probably wrong axis, and the words that it needs."""
    choice, key, usual = aimed(luck)
    numbers = [luck.choice((*NUMBERS, "8", "9", "16")) for _ in range(4)]
    first, second, third, _ = numbers
    ways = (
        [f"{luck.choice(('seed', key))}={first}..{second}"],
        [f"model.width={first}..{second}:{third}:{luck.choice(('log', 'linear', 'lin'))}"],
        [f"{key}={usual},{value(luck)}"],
        [*choice, f"{key}={','.join(numbers)}"],
        [f"{luck.choice(('model', 'loss', 'data'))}={misspelt('mlp,cnn', luck)}"],
        [f"{key}={letters(luck, 20)}"],
        [f"seed={luck.choice(('0..1', '3', '0,0', '-1', '0..100000000000', 'x', '1e3', '', '0..4:2'))}"],
    )
    return list(luck.choice(ways))
