"""Proof (a): the consumed gradient is that of the examples seen, g, up to factors, which scales and clipping explain.

    consumed = c·g      a scale     c = 2^k, of a scaler that was taken back; 2^k/n ≤ 1, of a mean; or a c < 1 that
                                    another step has, but for 2^k
                        clipping    c = u·M/(u‖g‖ + 1e-6), u a scale: c‖g‖ is M at every step that was clipped

where the norms are over the parameters that share c. A gradient of several numbers that is c times another is so by no
accident. One of a single number always is: its c has to be that of parameters that it may have been clipped with, a
power of two, or lead to a norm that others were clipped to.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import frexp, hypot, log2, sqrt

import torch
from torch import Tensor

from ntkexp.foreign_loop.host_reads import read_numbers
from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import GUARD
from ntkexp.shapes import Weights
from ntkexp.text import counted

AGREES = 1e3  # eps: of sums over a batch, in another order, relative to the sum of their sizes
OF_NOISE = 64  # times what a relative noise of eps does to a gradient
OF_CASTS = 8  # eps of the shorter numbers: of the same sums by other kernels; by the same ones they are the same
SAME = 4  # bounds of the proof: of two factors, or norms, each of which is known to one
PARTS = 1000  # the largest n of which a mean may be taken
RESOLVED = 0.05  # bounds: of a norm beside another
FAIR = 0.1  # the share of the steps of a parameter that have the norm, or the scale, of one of them
ADDED = "was a term added to the loss, or a gradient changed by hand?"
RARE = 0.01  # the share of all numbers that may be within the bound of some 1/n
ALIKE = (
    f"{ADDED} A penalty on weights is followed as weight_decay of "
    "the optimizer; one on another output, when that is part of the module's output (output=…), or of a call of its own"
)
DREW = (
    "were other random numbers drawn in the call, by fused attention (choose attn_implementation='eager', or "
    "SDPBackend.MATH in the loop), by a compiled model, after seeding inside? If not, " + ALIKE
)


# --- The factors between two gradients.


@dataclass(frozen=True)
class StepFacts:
    """Facts about the calls of a step, for the message of a refusal."""

    rows: int  # examples
    drew: bool  # whether a call drew random numbers
    other_outputs: tuple[str, ...] = ()  # outputs of the model that are not followed


def factors_between(
    found: Weights,
    consumed: Weights,
    step: int,
    facts: StepFacts,
    room: float,
    noise: Callable[[], Weights],
) -> tuple[dict[str, float], float]:
    """The factors of the parameters between the gradient that was found, of these calls, and the consumed one, and how
    far the two differ after all: by no more than rounding, also of casts, which have that `room`, and of terms that
    cancel, for which `noise` tells how far rounding moves the gradient."""
    if not consumed:
        return {}, 0.0
    bound = bound_of(consumed, room)

    # one factor for all parameters, or else one for each
    factor, missed = factor_of_parts(
        [(found[name].flatten(), part.flatten()) for name, part in consumed.items()]
    )
    if missed <= bound:
        return dict.fromkeys(consumed, factor), missed
    moved = noise()
    for near in (
        near_power_of_two(factor, missed),
        1.0,
    ):  # of a gradient that is all rounding no factor is known
        if cancels(found, consumed, near, bound, moved):
            return dict.fromkeys(consumed, near), missed
    each = {
        name: factor_between(found[name].flatten(), consumed[name].flatten()) for name in consumed
    }
    worst = max(each, key=lambda name: each[name][1])
    if (missed := each[worst][1]) <= bound:
        return {name: one[0] for name, one in each.items()}, missed
    reason = DREW if facts.drew else ALIKE
    if facts.other_outputs:
        others = " or ".join(facts.other_outputs)
        reason = (
            f"does the loss use the output {others} of the model as well, or alone? One is followed: name "
            "it, output=…, or let the model return all that the loss uses as one tensor (torch.cat)"
        )
    raise Mistake(
        f"step {step}: the gradient that was consumed is not that of the {facts.rows} examples seen, off by "
        f"{missed:.2g} of itself in '{worst}'; {reason}"
    )


def cancels(found: Weights, consumed: Weights, factor: float, bound: float, noise: Weights) -> bool:
    """Whether rounding of terms that cancel explains the difference between two gradients, parameter by parameter."""
    for name, part in consumed.items():
        missed = float((factor * found[name] - part).norm())
        rounding = OF_NOISE * abs(factor) * float(noise[name].norm()) if name in noise else 0.0
        if not missed <= bound * float(part.norm()) + rounding:
            return False
    return True


def near_power_of_two(factor: float, missed: float) -> float:
    """Return the power of two that a factor is near to, up to a relative error, or the factor itself.

    >>> near_power_of_two(0.25 + 1e-12, 1e-11), near_power_of_two(0.3, 1e-11)
    (0.25, 0.3)
    """
    if factor <= 0:
        return factor
    power = 2.0 ** round(log2(factor))
    return power if abs(factor - power) <= missed * power else factor


def factor_between(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """The factor between two gradients, and how far they differ, relative to the second; in long numbers where squares
    would underflow, as those of examples that are all but learned do.

    >>> factor_between(torch.full((2,), 2e-25), torch.full((2,), 1e-25))
    (0.5, 0.0)
    """
    return factor_of_parts([(ours, theirs)])


def factor_of_parts(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """The same of gradients in parts, which are never copied as a whole: of a large model that takes gigabytes."""
    count, numbers = sum(theirs.numel() for _, theirs in pairs), torch.finfo(pairs[0][1].dtype)
    read = read_numbers([each for o, t in pairs for each in (o.norm(), t.norm(), o @ o, o @ t)])
    sizes = [hypot(*read[::4]), hypot(*read[1::4])]
    if count and min(sizes) ** 2 < numbers.tiny / count and pairs[0][1].dtype != torch.float64:
        return factor_of_parts([(ours.double(), theirs.double()) for ours, theirs in pairs])
    square = sum(read[2::4])
    factor = sum(read[3::4]) / square if square else 0.0
    missed = hypot(*read_numbers([(factor * ours - theirs).norm() for ours, theirs in pairs]))
    return factor, missed / sizes[1] if sizes[1] else 0.0


def bound_of(consumed: Weights, room: float) -> float:
    """How far rounding may take a gradient, relative to it, and casts that have this room."""
    return max(
        AGREES * max((torch.finfo(part.dtype).eps for part in consumed.values()), default=0.0),
        OF_CASTS * room,
    )


# --- Whether scales and clipping explain the factors of a loop.


@dataclass(frozen=True, eq=False)
class Multiplied:
    """Parameters whose gradients a step multiplied with one factor; `squares` are of the norms that were consumed."""

    step: int
    names: tuple[str, ...]
    factor: float
    squares: array[float]
    single: bool  # of one number in all
    bound: float  # of rounding, relative

    @property
    def norm(self) -> float:
        """Of what was consumed."""
        return sqrt(sum(self.squares))

    @property
    def room(self) -> float:
        """How far a norm may be from another that clipping leaves, where it was asked for one up to 1e-6 above both."""
        return SAME * self.bound * self.norm + GUARD

    @property
    def mantissa(self) -> float:
        """The factor without its power of two, by which a scaler grows or shrinks."""
        return frexp(self.factor)[0]

    def may_be_clipped(self, other: Multiplied) -> bool:
        """Whether clipping by norm may have led to this norm, which is that of another step.

        A single number that was cut to the same to the bit, where a norm would leave 1e-6 of it, was clipped by value.
        """
        if not self.single:
            return self.factor > 0
        by_value = abs(self.norm - other.norm)
        by_norm = abs(self.norm + GUARD * self.factor - other.norm - GUARD * other.factor)
        return 0 < self.factor < 1 and by_norm <= max(by_value, RESOLVED * self.bound * self.norm)

    def only(self, names: Iterable[str]) -> Multiplied:
        """The part of some of the parameters."""
        chosen = frozenset(names)
        places = [place for place, name in enumerate(self.names) if name in chosen]
        squares = array("d", (self.squares[place] for place in places))
        return replace(self, names=tuple(self.names[place] for place in places), squares=squares)


@dataclass
class Factors:
    """The factors by which steps multiplied gradients, without those that are scales."""

    seen: list[Multiplied] = field(default_factory=list)

    def take(
        self,
        step: int,
        factors: Mapping[str, float],
        found: Weights,
        consumed: Weights,
        bound: float,
    ) -> dict[str, float]:
        """Note the factors of a step; those of single numbers are afterwards those of the groups they fit."""
        # groups of parameters with one factor; a parameter of a single number, whose factor may be any, goes with the
        # group whose factor explains it to the rounding of the whole gradient
        counts = read_numbers([consumed[name].count_nonzero() for name in factors])
        numbers = dict(zip(factors, counts, strict=True))
        chosen, groups = dict(factors), list[list[str]]()
        if len(set(factors.values())) == 1:
            groups.append(list(factors))
        else:
            singles = [name for name in factors if numbers[name] < 2]
            groups += clusters(
                {name: factor for name, factor in factors.items() if numbers[name] > 1},
                SAME * bound,
            )
            room = bound * sqrt(sum(float(consumed[name].square().sum()) for name in factors))
            for name in singles:
                fits = [
                    float((chosen[group[0]] * found[name] - consumed[name]).norm())
                    for group in groups
                ]
                if groups and min(fits) <= room:
                    group = groups[fits.index(min(fits))]
                    chosen[name] = chosen[group[0]]
                    group.append(name)
                else:
                    groups.append([name])

        # scales are explained at once; what may be clipping is compared with the other steps, in `refuse_unexplained`
        for group in groups:
            factor, single = chosen[group[0]], sum(numbers[name] for name in group) < 2
            if not is_scale(factor, bound, 1 if single else PARTS):
                squares = array(
                    "d", read_numbers([consumed[name].square().sum() for name in group])
                )
                self.seen.append(Multiplied(step, tuple(group), factor, squares, single, bound))
        return chosen

    def refuse_unexplained(self) -> None:
        """Refuse factors that neither scales nor clipping give."""
        # norms to which several steps lead were clipped to
        ordered = sorted(self.seen, key=lambda each: each.norm)
        norms = [each.norm for each in ordered]
        clipped = set[Multiplied]()
        for each, alike_ones in zip(
            ordered, shared(ordered, norms, lambda each: each.room), strict=True
        ):
            others = [other for other in alike_ones if other is not each]
            if others and all(map(each.may_be_clipped, others)):
                clipped.add(each)

        # factors of other steps, but for a power of two, are scales; sums of clipped groups are clipped
        left = [each for each in self.seen if each not in clipped]
        scales = {each.mantissa for each in scales_among(left)}
        known = {frozenset(each.names): each.norm for each in ordered if each in clipped}
        left = [
            each
            for each in left
            if not is_sum(each, known)
            and not (
                0 < each.factor < 1
                and any(alike(each.mantissa, m, SAME * each.bound) for m in scales)
            )
        ]

        # what is clipped at one step alone is known by its direction
        times = Counter(name for each in left for name in each.names)
        for each in sorted(left, key=lambda each: each.step):
            once = 0 < each.factor < 1 and all(times[name] == 1 for name in each.names)
            if each.single or not once:
                more = (
                    f" and {counted(len(each.names) - 1, 'parameter')} more"
                    if each.names[1:]
                    else ""
                )
                what = (
                    "one number, whose factor is that of no group it could be clipped with"
                    if each.single
                    else "not a scale, and not to the norm of another step, as by clipping to one norm"
                )
                raise Mistake(
                    f"step {each.step}: the gradient that was consumed is not that of the examples seen: in "
                    f"'{each.names[0]}'{more} it is {each.factor:.4g} times that, {what}; {ADDED}"
                )


def scales_among(several: Sequence[Multiplied]) -> Iterator[Multiplied]:
    """Those whose factor is, but for a power of two, that of other steps; of one number, of almost all others."""
    for single, fair in ((False, FAIR), (True, 1 - FAIR)):
        ordered = sorted(
            (each for each in several if each.single == single), key=lambda each: each.mantissa
        )
        mantissas = [each.mantissa for each in ordered]
        for each, ends in zip(
            ordered, shared(ordered, mantissas, lambda each: SAME * each.bound, fair), strict=True
        ):
            if any(other.step != each.step for other in ends) and 0 < each.factor < 1:
                yield each


def shared(
    ordered: Sequence[Multiplied],
    values: Sequence[float],
    room: Callable[[Multiplied], float],
    fair: float = FAIR,
) -> Iterator[tuple[Multiplied, ...]]:
    """For each, the first and the last of those with its value, if these are a fair share of all that are of the same
    parameter: by chance any number has a few that are near to it."""
    times = Counter(name for each in ordered for name in each.names)
    for each, value in zip(ordered, values, strict=True):
        first, last = (
            bisect_left(values, value - room(each)),
            bisect_right(values, value + room(each)),
        )
        enough = last - first >= max(2.0, fair * min(times[name] for name in each.names))
        yield (ordered[first], ordered[last - 1]) if enough else ()


def clusters(factors: Mapping[str, float], room: float) -> list[list[str]]:
    """The names whose factors are the same but for rounding.

    >>> clusters({"a": 0.5, "b": 1.0, "c": 0.5}, 1e-9)
    [['a', 'c'], ['b']]
    """
    found: list[list[str]] = []
    for name in sorted(factors, key=lambda name: factors[name]):
        if found and alike(factors[found[-1][0]], factors[name], room):
            found[-1].append(name)
        else:
            found.append([name])
    return found


def is_sum(each: Multiplied, known: Mapping[frozenset[str], float]) -> bool:
    """Whether it is groups that were clipped by themselves to known norms, whose factors are the same this time."""
    left = each
    if each.single or each.factor < 0:
        return False
    for names, norm in known.items():
        part = left.only(names)
        if len(part.names) == len(names) and abs(part.norm - norm) <= part.room:
            left = left.only(name for name in left.names if name not in names)
    return not left.names or (
        left is not each and any(abs(left.norm - norm) <= left.room for norm in known.values())
    )


def alike(one: float, other: float, room: float) -> bool:
    """Whether two factors are the same but for rounding."""
    return abs(one - other) <= room * max(abs(one), abs(other))


def is_scale(factor: float, bound: float, most: int = PARTS) -> bool:
    """Whether the factor is a power of two, one over a whole number up to a limit, 1, or 0.

    >>> [is_scale(factor, 1e-9) for factor in (1.0, 2.0**-10, 1 / 3, 2.0, 0.3, 3.0, -1.0, 0.0)]
    [True, True, True, True, False, False, False, True]
    """
    if factor <= 0:
        return factor == 0
    parts = range(1, int(min(most, max(1.0, RARE / bound))) + 1 if factor < 1 else 2, 2)
    return any(
        2 * part - 1 <= bound or 1 - part <= bound for part in (frexp(factor * n)[0] for n in parts)
    )
