"""How long a run takes, from shapes alone: the same experiment is estimated the same on every machine and day.

seconds   on one core of an ordinary processor: START + steps · positions · (BASE + points · work · RATE)
work      of one point: its weights, and for every number on its tape what the features cost

What would outlast its user is refused before it begins; a run that ends at a loss is not known by its steps.
"""

from __future__ import annotations

from ntkexp.mistake import Mistake
from ntkexp.path.budget import Budget
from ntkexp.text import YEAR, duration

START, BASE, RATE = 3.0, 0.003, 8e-11
PER_NUMBER = 64  # of a tape, in weights: rows of the features are multiplied with those of the training examples
PATIENCE = {"cpu": 10.0, "cuda": 10_000.0}  # years of such a core: of many cores, a year; a GPU is a thousand of them


def core_seconds(budget: Budget, steps: int, passes: int) -> float:
    """The seconds of a run that goes over its path once, or there and back."""
    work = budget.points * (budget.parameters + PER_NUMBER * budget.tape_bytes / budget.number_bytes)
    return START + steps * budget.tapes * passes * (BASE + work * RATE)


def refuse_endless(seconds: float, steps: int, device: str) -> None:
    """Refuse a run that would outlast its user."""
    remedy = "steps, model.width, data.train or path.pieces, or end at a loss with stop_at_loss"
    refuse_years(seconds, f"steps={steps}", device, remedy)


def refuse_years(seconds: float, what: str, device: str, remedy: str) -> None:
    """Years are a mistake; `remedy` says which keys make them fewer.

    >>> refuse_years(1e9, "steps=9", "cpu", "steps")
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: steps=9: this would take about 32 years on one core, more than 10 years; lower steps
    """
    patience = PATIENCE.get(device.partition(":")[0], PATIENCE["cuda"])
    if seconds > patience * YEAR:
        raise Mistake(
            f"{what}: this would take about {duration(seconds)} on one core, more than {patience:g} years; "
            f"lower {remedy}"
        )
