"""What a path has added up by the end of each of its phases, so that each phase's share is a difference.

    𝒮_p(x, xᵢ) = 𝒮(x, xᵢ; T_p) − 𝒮(x, xᵢ; T_{p−1}),        f(T_p) − f(T_{p−1}) = Σᵢ 𝒮_p(x, xᵢ) + 𝒟_p(x)

where T_p is the step at which phase p ends. An optimizer that remembers moves weights by gradients of earlier phases
too: 𝒮(·; T) is then the sum over the gradients until T of what they did until T, and has a pass backwards of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from jaxtyping import Float
from torch import Tensor

from ntkexp.on_disk import RowsInFile, RowsOfArray, placed
from ntkexp.path.accumulate.integrals import Integrals


class Sums(NamedTuple):
    """𝒮 and 𝒟 so far, by one rule."""

    contributions: Float[Tensor, "point out train"]
    decay: Float[Tensor, "point out"]


Mark: TypeAlias = Mapping[str, Sums]
"""The sums at the end of a phase, by rule."""


def mark_of(integrals: Mapping[str, Integrals]) -> Mark:
    """The sums as they are now."""
    return {
        name: Sums(placed(found.contributions, like=found.contributions), found.decay.clone())
        for name, found in integrals.items()
    }


def states(marks: Sequence[Mark]) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """Marks as plain data and tensors, for a checkpoint."""
    return [{name: (sums.contributions, sums.decay) for name, sums in mark.items()} for mark in marks]


def marks_from(state: Sequence[Mapping[str, tuple[Tensor | RowsInFile, Tensor]]], like: Tensor) -> list[Mark]:
    """Marks of a checkpoint, where the sums of the run lie."""
    return [
        {
            name: Sums(placed(contributions, like), decay.to(like.device))
            for name, (contributions, decay) in mark.items()
        }
        for mark in state
    ]


class Share(NamedTuple):
    """What was added in one phase by one rule: the sums at its end, but for those at its beginning."""

    end: Sums
    begin: Sums | None  # of the first phase, zero

    @property
    def contributions(self) -> RowsOfArray:
        """What each example added."""
        return RowsOfArray(self.end.contributions, None if self.begin is None else self.begin.contributions)

    @property
    def decay(self) -> Float[Tensor, "point out"]:
        """What decay of the weights took away."""
        return self.end.decay if self.begin is None else self.end.decay - self.begin.decay


def by_phase(marks: Sequence[Mark], end: Mark, rule: str, phases: int) -> list[Share]:
    """The shares of so many phases by a rule, from the sums at their ends; a phase that was not reached did nothing.

    >>> import torch
    >>> ones = Sums(torch.ones(1, 1, 1), torch.zeros(1, 1))
    >>> shares = by_phase([{"left": ones}], {"left": Sums(3 * ones.contributions, ones.decay)}, "left", 3)
    >>> [share.contributions[:].item() for share in shares]
    [1.0, 2.0, 0.0]
    """
    ends = [mark[rule] for mark in (*marks, end)]
    ends += [ends[-1]] * (phases - len(ends))
    return [Share(end, begin) for end, begin in zip(ends, (None, *ends), strict=False)]
