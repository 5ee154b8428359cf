"""How long a run takes, from shapes alone: the same experiment is estimated the same on every machine and day.

seconds   on one core of an ordinary processor: START + steps · (BASE + positions · points · work · RATE)
work      of one point: its weights, and for every number on its tape what the features cost

What would outlast its user is refused before it begins; a run that ends at a loss is not known by its steps.
"""

from __future__ import annotations

from ntkexp.mistake import Mistake
from ntkexp.path.budget import Budget
from ntkexp.text import YEAR, duration

START, BASE, RATE = 3.0, 0.01, 8e-11
PER_NUMBER = 64  # of a tape, in weights: rows of the features are multiplied with those of the training examples
PATIENCE = {"cpu": 10.0, "cuda": 10_000.0}  # years of such a core: of many cores, a year; a GPU is a thousand of them


def core_seconds(budget: Budget, steps: int, passes: int) -> float:
    """Of a run that goes over its path once, or there and back."""
    work = budget.points * (budget.parameters + PER_NUMBER * budget.tape_bytes / budget.number_bytes)
    return START + steps * (BASE + budget.tapes * passes * work * RATE)


def refuse_endless(seconds: float, steps: int, device: str) -> None:
    """Years are a mistake."""
    patience = PATIENCE.get(device.partition(":")[0], PATIENCE["cuda"])
    if seconds > patience * YEAR:
        raise Mistake(
            f"steps={steps}: this would take about {duration(seconds)} on one core, more than {patience:g} years; "
            "lower steps, model.width, data.train or path.pieces, or end at a loss with stop_at_loss"
        )
