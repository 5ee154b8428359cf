"""Rows with equal inputs have one digest, and count as one example; a sentence says of how many this may be wrong.

A loop that draws an example twice looks like one that has two examples with equal inputs, and in shuffled epochs
nothing tells which of the two a row is. Rows are therefore never numbered by their order, which would mix
the contributions of two examples. The contribution of a digest is exact, as the sum over all of its rows. Four signs of
several examples are reported:

    equal rows in one call, different ∂L/∂f     they are several, with other labels or weights
    equal rows in one call, the same ∂L/∂f      several, or one that was drawn twice
    ∂L/∂f = κ(p − 1ₖ) of several classes k      several that come in different calls, with other labels
    used twice as often as nearly all others    several that come in different calls, or one that is drawn more often
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ntkexp.foreign_loop.call import ModelCall
from ntkexp.foreign_loop.example_names import is_digest
from ntkexp.text import counted, several

if TYPE_CHECKING:
    import xarray as xr

EQUAL_INPUTS = "equal_inputs"
"""The attribute that holds the sentence."""
DIFFERENT = 0.06  # share of the largest ∂L/∂f of a call: 8 eps of bfloat16, as casts may round equal rows differently
USUAL = 0.9  # share of the examples that show no sign, and are used equally often up to an incomplete epoch
FEWEST = 10  # examples among which this can be seen


@dataclass
class RepeatedInputs:
    """Digests that occur several times in a call, and the number of uses of every digest."""

    used: Counter[str] = field(default_factory=Counter)
    together: set[str] = field(default_factory=set)  # in one call
    differing: set[str] = field(default_factory=set)  # in one call, with different ∂L/∂f
    classes: dict[str, int] = field(default_factory=dict)  # the first that ∂L/∂f raises
    other_classes: set[str] = field(default_factory=set)  # examples of which it raises several

    def add(self, call: ModelCall) -> None:
        """Count the rows of a call, unless `ids=` names them."""
        if not all(map(is_digest, call.names)):
            return
        self.used.update(call.names)
        for name, raised in zip(call.names, classes_of(call), strict=True):
            if raised >= 0 and self.classes.setdefault(name, raised) != raised:
                self.other_classes.add(name)
        if len(set(call.names)) == len(call.names):
            return
        places = dict[str, list[int]]()
        for place, name in enumerate(call.names):
            places.setdefault(name, []).append(place)
        random = bool(call.how.states)  # masks of dropout give equal rows different ∂L/∂f
        for name, equal in places.items():
            if len(equal) == 1:
                continue
            self.together.add(name)
            if call.gradient is not None and not random and are_different(call.gradient, equal):
                self.differing.add(name)

    def often(self) -> set[str]:
        """Return the digests that are used at least twice as often as nearly all others.

        >>> three_epochs = Counter(dict.fromkeys("abcdefghijk", 3))
        >>> RepeatedInputs(three_epochs + Counter(l=6)).often()
        {'l'}
        """
        least = min(self.used.values(), default=0)
        usual = sum(times <= least + 1 for times in self.used.values())
        if len(self.used) < FEWEST or usual < USUAL * len(self.used):
            return set()
        return {
            name for name, times in self.used.items() if times > least + 1 and times >= 2 * least
        }

    def relabelled(self) -> set[str]:
        """Return the digests whose rows raise several classes; none if many do, as soft labels make them."""
        few = (1 - USUAL) * len(self.used)
        return self.other_classes if len(self.other_classes) <= max(few, 1.0) else set()

    @property
    def facts(self) -> dict[str, str]:
        """Return the sentence as an attribute; nothing if no inputs repeat."""
        labels = self.differing | self.relabelled()
        signs = {
            "with different ∂L/∂f (other labels?)": labels,
            "several times in one call (or drawn twice?)": self.together - labels,
            "used twice as often as the others (or drawn more often?)": self.often()
            - self.together
            - labels,
        }
        parts = [
            f"{counted(len(names), 'example')} {sign}: {several(sorted(names))}"
            for sign, names in signs.items()
            if names
        ]
        if not parts:
            return {}
        advice = "name rows by ids='dataset' or a function, ids=…, to tell them apart"
        return {
            EQUAL_INPUTS: f"rows with equal inputs count as one example ({'; '.join(parts)}); {advice}"
        }


def classes_of(call: ModelCall) -> list[int]:
    """Return the class that a softmax cross-entropy raises in each row, or −1 where ∂L/∂f is not of one.

    κ(p − 1ₖ) sums to zero, and only its entry for the label k is negative.

    >>> gradient = torch.tensor([[0.2, -0.5, 0.3], [0.2, 0.5, -0.1]])
    >>> classes_of(ModelCall(0, torch.ones(2, 1), gradient=gradient, shape=(2, 3)))
    [1, -1]
    """
    if call.gradient is None or len(call.shape) != 2:
        return [-1] * len(call.names)
    gradient = call.gradient
    sizes = gradient.abs().amax(1)
    of_softmax = (gradient.sum(1).abs() <= DIFFERENT * sizes) & ((gradient < 0).sum(1) == 1)
    found: list[int] = torch.where(of_softmax, gradient.argmin(1), -1).tolist()
    return found


def are_different(gradient: Tensor, places: list[int]) -> bool:
    """Whether the rows at some places differ by more than rounding."""
    rows = gradient[places]
    return float((rows - rows[0]).abs().max()) > DIFFERENT * float(gradient.abs().max())


def equal_inputs_sentence(found: xr.Dataset) -> str:
    """Return the sentence on inputs that repeat; an empty one if none do."""
    return str(found.attrs.get(EQUAL_INPUTS, ""))
