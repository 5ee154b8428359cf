"""Command lines with existing or misspelt keys and odd values."""

from __future__ import annotations

from random import Random

from tests.torture.damage import CHOICES, CHOSEN, aimed, letters, misspelt, value
from tests.torture.stage import SMALL, Outcome, Stage

COMMANDS = (
    *(("config",),) * 6,
    ("config", "--tree"),
    *(("train", "--quiet"),) * 4,
    ("kernel", "limit", "--quiet"),
    ("kernel", "tangent", "--quiet"),
    ("sweep", "--dry-run"),
)


def play(luck: Random, stage: Stage) -> Outcome:
    words = [word for _ in range(luck.choice((1, 1, 1, 2, 3))) for word in override(luck)]
    return stage.outcome(*luck.choice(COMMANDS), *SMALL, *words)


def override(luck: Random) -> list[str]:
    """Draw a probably wrong override, and the words that it needs."""
    choice, key, usual = aimed(luck)
    match luck.randrange(10):
        case 0:
            return [
                *choice,
                f"{luck.choice(('+', '++', '~', '', ' ', '@'))}{key}{luck.choice(('=', '', '@a=', '=='))}{usual}",
            ]
        case 1:
            return [*choice, f"{misspelt(key, luck)}={usual}"]
        case 2:
            return [*choice, f"{key}={misspelt(usual, luck)}"]
        case 3:
            group = luck.choice(CHOSEN)
            name = luck.choice((value(luck), misspelt(luck.choice(CHOICES.options(group)), luck)))
            return [f"{luck.choice(('', '+', '++', '~', 'a/'))}{group}={name}"]
        case 4:
            return [letters(luck, 30)]
    return [*choice, f"{key}={value(luck)}"]
