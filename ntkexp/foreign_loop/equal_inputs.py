"""Detect whether rows with equal inputs come from different examples.

By default, examples are named by digests of their inputs. Rows with equal inputs then
count as one example, whose contribution is the sum over these rows. This is wrong if
the rows come from different examples, which the recorded rows do not always show. A
report therefore lists four signs of different examples:

    equal rows in one call, different ∂L/∂f     several examples with different labels or weights
    equal rows in one call, the same ∂L/∂f      several examples, or one that was drawn twice
    ∂L/∂f = κ(p − 1ₖ) of several classes k      several examples with different labels k
    used twice as often as nearly all others    several examples, or one that is drawn more often
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.foreign_loop.call import ModelCall
from ntkexp.foreign_loop.cross_entropy import CrossEntropyGradient
from ntkexp.text import counted, is_digest, several

if TYPE_CHECKING:
    import xarray as xr

# name of the attribute that holds the sentence on repeated inputs
EQUAL_INPUTS = "equal_inputs"
# Casts may round ∂L/∂f of two equal rows differently. Their difference is at most this
# fraction of the largest |∂L/∂f| (8 eps of bfloat16).
ROUNDED_SHARE = 0.06
# "Nearly all" examples means at least this fraction. The fourth sign is reported only
# if nearly all examples are used about equally often. The third sign is reported only
# if nearly all examples have one label.
USUAL_SHARE = 0.9
# with fewer examples than this, the number of uses is not examined
FEWEST_EXAMPLES = 10


@dataclass
class RepeatedInputs:
    """The digests of inputs that show one of the four signs (see above)."""

    # number of uses of every digest
    used: Counter[str] = field(default_factory=Counter)
    # digests that occur repeatedly in one call
    together: set[str] = field(default_factory=set)
    # digests that occur repeatedly in one call, with different ∂L/∂f
    differing: set[str] = field(default_factory=set)
    # for each digest, the first label that ∂L/∂f = κ(p − 1ₖ) shows
    classes: dict[str, int] = field(default_factory=dict)
    # digests whose ∂L/∂f showed two or more different class labels
    other_classes: set[str] = field(default_factory=set)

    def add(self, call: ModelCall) -> None:
        """Add the rows of a call. Ignore calls whose examples are named by `ids=`."""
        if not all(map(is_digest, call.names)):
            return
        self.used.update(call.names)
        for name, label in zip(call.names, classes_of(call), strict=True):
            if label >= 0 and self.classes.setdefault(name, label) != label:
                self.other_classes.add(name)

        # no example occurs twice in the call
        if len(set(call.names)) == len(call.names):
            return
        rows_of = defaultdict[str, list[int]](list)
        for row, name in enumerate(call.names):
            rows_of[name].append(row)
        # dropout gives equal rows different ∂L/∂f
        is_random = bool(call.circumstances.states)
        for name, rows in rows_of.items():
            if len(rows) == 1:
                continue
            self.together.add(name)
            if not is_random and are_different(call, rows):
                self.differing.add(name)

    def often(self) -> set[str]:
        """Return the digests that are used at least twice as often as nearly all
        others.

        >>> three_epochs = Counter(dict.fromkeys("abcdefghijk", 3))
        >>> RepeatedInputs(three_epochs + Counter(l=6)).often()
        {'l'}
        """
        least = min(self.used.values(), default=0)
        usual = sum(uses <= least + 1 for uses in self.used.values())
        if len(self.used) < FEWEST_EXAMPLES or usual < USUAL_SHARE * len(self.used):
            return set()
        fewest = max(least + 2, 2 * least)
        return {name for name, uses in self.used.items() if uses >= fewest}

    def relabelled(self) -> set[str]:
        """Return the digests whose ∂L/∂f shows several labels.

        Return an empty set if there are many of them, because the loop then uses soft
        labels.
        """
        few = (1 - USUAL_SHARE) * len(self.used)
        return self.other_classes if len(self.other_classes) <= max(few, 1.0) else set()

    def facts(self, numbers: Mapping[str, int]) -> dict[str, str]:
        """Return a sentence on all signs, as an attribute of the attribution. Return {}
        if there is no sign.

        `numbers` maps digests to the numbers that name examples in the sentence."""
        labels = self.differing | self.relabelled()
        drawn_twice = self.together - labels
        signs = {
            "with different ∂L/∂f (other labels?)": labels,
            "several times in one call (or drawn twice?)": drawn_twice,
            "used twice as often as the others (or drawn more often?)": self.often()
            - drawn_twice
            - labels,
        }
        parts = list[str]()
        for sign, names in signs.items():
            shown = [f"#{number}" for number in sorted(numbers[name] for name in names)]
            if shown:
                parts.append(
                    f"{counted(len(shown), 'example')} {sign}: {several(shown)}"
                )
        if not parts:
            return {}
        sentence = (
            f"rows with equal inputs count as one example ({'; '.join(parts)}); to tell "
            "them apart, name rows by ids='dataset' or by a function, ids=…"
        )
        return {EQUAL_INPUTS: sentence}


def classes_of(call: ModelCall) -> list[int]:
    """Return the label k of each row if ∂L/∂f = κ(p − 1ₖ), as in cross-entropy,
    else −1.

    p are probabilities, and 1ₖ is the one-hot vector of the label. κ(p − 1ₖ) sums to
    zero, and only its entry k is negative.

    >>> gradient = torch.tensor([[0.2, -0.5, 0.3], [0.2, 0.5, -0.1]])
    >>> classes_of(ModelCall(0, torch.ones(2, 1), gradient=gradient, shape=(2, 3)))
    [1, -1]
    """
    gradient = call.gradient
    if gradient is None or call.joined or len(call.shape) != 2:
        return [-1] * len(call.names)
    if isinstance(gradient, CrossEntropyGradient):
        labels: list[int] = gradient.targets.where(gradient.weights != 0, -1).tolist()
        return labels
    sums_to_zero = gradient.sum(1).abs() <= ROUNDED_SHARE * gradient.abs().amax(1)
    has_one_negative = (gradient < 0).sum(1) == 1
    classes: list[int] = torch.where(
        sums_to_zero & has_one_negative, gradient.argmin(1), -1
    ).tolist()
    return classes


def are_different(call: ModelCall, rows: list[int]) -> bool:
    """Return True if these rows of ∂L/∂f are not all equal up to rounding. If ∂L/∂f is
    stored as targets and weights, compare these."""
    if isinstance(call.gradient, CrossEntropyGradient):
        examples = len(call.names)
        targets = call.gradient.targets.view(examples, -1)[rows]
        weights = call.gradient.weights.view(examples, -1)
        return bool((targets != targets[0]).any()) or is_spread(weights, rows)
    return call.gradient is not None and is_spread(call.gradient, rows)


def is_spread(numbers: Float[Tensor, "example _"], rows: list[int]) -> bool:
    """Return True if these rows are not all equal up to rounding."""
    values = numbers[rows]
    spread = float((values - values[0]).abs().max())
    return spread > ROUNDED_SHARE * float(numbers.abs().max())


def equal_inputs_sentence(attribution: xr.Dataset) -> str:
    """Return a sentence on repeated inputs, or an empty string."""
    return str(attribution.attrs.get(EQUAL_INPUTS, ""))
