"""Proof (a): the gradient that the optimizer used is c g, where g is the gradient of
the recorded examples. The factor c must be a scale, or come from clipping.

    scale       c = 2^k of a GradScaler; c = 2^k/n ≤ 1 of a mean; or any c < 1 that also occurs in
                another step, up to a power of two
    clipping    c = u·M/(u‖g‖ + 1e-6), where u is a scale and M the clipping norm: c‖g‖ ≈ M at every
                clipped step

Norms are over all parameters with the same c. If the gradient has several elements, a
factor c exists only if both gradients have the same direction, which does not happen by
chance. If the gradient has a single element, a factor always exists. In this case c
must be a power of two, or equal the factor of a group of other parameters, or lead to
the clipping norm or the clipping value of other steps.

Clipping by value multiplies each element by a different factor.
See `value_clipping`."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import frexp, hypot, inf, log2, sqrt

import torch
from torch import Tensor

from ntkexp.foreign_loop.host_reads import read_numbers
from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import GUARD
from ntkexp.shapes import Weights
from ntkexp.text import counted

# relative rounding error of a batch gradient that is summed in another order, in units
# of eps
SUM_EPS = 1e3
# If weights and inputs are perturbed by one eps, the gradient changes by δ. Rounding
# may change the gradient by up to this multiple of δ.
NOISE_MULTIPLE = 64
# relative rounding error of a batch gradient under casts, in units of the lower
# precision's eps
CAST_EPS = 8
# Each factor and norm has a bound on its rounding error. Two factors, or two norms,
# count as equal if they differ by at most this multiple of the bound.
EQUAL_BOUNDS = 4
# A factor 2^k/n counts as a scale (a mean of n terms) if n is at most this number.
MAX_MEAN = 1000
# This multiple is used instead of EQUAL_BOUNDS for bounds of clipping by value, and for
# norms of gradients with a single nonzero element. It is smaller, because in these
# cases no other check would detect a wrong factor.
RESOLVED_BOUNDS = 0.05
# A norm or scale is accepted if at least this fraction of a parameter's steps has it.
# Fewer steps may agree by chance.
COMMON_SHARE = 0.1
WHAT_ADDED = "was a term added to the loss, or a gradient changed by hand?"
ASK_LOSSES = "let a function return one loss for each example, and call it as trace.losses(function, *batch)"
# Changes of a factor or bound, in units in the last place. They are tried one after
# another until the replayed gradient has the same bits as the optimizer's gradient.
UNITS = (0, 1, -1, 2, -2, 3, -3, 4, -4)
# If n may be large, any factor is close to some 2^k/n. So n is limited: about this
# fraction of random factors is close to some 2^k/n by chance.
RARE_SHARE = 0.01
ASK_ADDED = (
    f"{WHAT_ADDED} For an L2 penalty on weights, use weight_decay of the optimizer. For a "
    "penalty on another output, let the module return this output (output=…), or "
    "compute it in a separate call. For another penalty on weights, or a loss on "
    f"derivatives of the model, {ASK_LOSSES}"
)
ASK_DERIVATIVES = (
    f"the loss uses derivatives of the model (create_graph=True); {ASK_LOSSES}"
)
ASK_SAME_LOSSES = (
    "does the function of trace.losses use the model that it is given, and only "
    "tensors and numbers that do not change?"
)
ASK_DRAWS = (
    "did the call draw other random numbers in the loop, because of fused attention "
    "(choose attn_implementation='eager', or SDPBackend.MATH in the loop), a compiled "
    "model, or seeding inside the model? If not, " + ASK_ADDED
)
ASK_OTHER_OUTPUTS = (
    "does the model draw random numbers from numpy or Python, keep a state between "
    "calls, or write to its inputs? Use random numbers of torch, and make a state an "
    "input of the model"
)


# --- The factors between two gradients.


@dataclass(frozen=True)
class StepFacts:
    """Facts about the calls of a step, from which an error message guesses why proof
    (a) failed."""

    rows: int  # number of examples
    drew: bool  # True if a call drew random numbers
    differentiated: bool  # True if a backward pass had create_graph=True
    losses: bool  # True if `trace.losses` was called
    other_outputs: tuple[str, ...]  # outputs without a row for each example
    passes: int  # largest number of backward passes through one call
    # returns the largest relative distance between the outputs of a call and of its
    # replay, or 0 if rounding may explain it
    outputs_missed: Callable[[], float] = lambda: 0.0
    # True if parameters had a gradient before following began
    began_with_gradient: bool = False


@dataclass(frozen=True)
class FactorFit:
    """One factor for each parameter, and the distance that remains
    between the two gradients."""

    factors: Mapping[str, float]
    # ‖c g − ĝ‖/‖ĝ‖, where ĝ is the gradient that the optimizer used. If all parameters
    # share one c, norms are over all of them. Otherwise this is the largest ratio of a
    # parameter.
    missed: float
    failing: tuple[str, ...] = ()  # parameters that no factor explains, the worst first
    # rounding error of the replayed g, if measured
    noise: Weights = field(default_factory=dict)

    @property
    def explains(self) -> bool:
        return not self.failing


def fit_factors(
    replayed: Weights,
    consumed: Weights,
    tolerance: float,
    noise: Callable[[], Weights],
) -> FactorFit:
    """Fit one factor c to all parameters. If it does not explain the gradient, fit a
    factor to each parameter.

    Args:
        replayed: gradient g of the recorded examples, or its signatures.
        consumed: gradient that the optimizer used, or its signatures.
        tolerance: eps of the lower precision under autocast, or 0.
        noise: function that measures the rounding error
            of a gradient whose terms cancel.
    """
    if not consumed:
        return FactorFit({}, 0.0)
    bound = bound_of(consumed, tolerance)

    # one factor for all parameters, or else one for each
    factor, missed = factor_of_parts(
        [(replayed[name].flatten(), part.flatten()) for name, part in consumed.items()]
    )
    if missed <= bound:
        return FactorFit(dict.fromkeys(consumed, factor), missed)
    measured_noise = noise()
    # 1.0 is for a gradient that consists only of rounding errors
    for near in (near_power_of_two(factor, missed), 1.0):
        if cancels(replayed, consumed, near, bound, measured_noise):
            return FactorFit(dict.fromkeys(consumed, near), missed)
    factors = {}
    distances = {}
    for name, part in consumed.items():
        fitted = factor_between(replayed[name].flatten(), part.flatten())
        factors[name], distances[name] = fitted
    from_worst = sorted(distances, key=lambda name: -distances[name])
    failing = tuple(name for name in from_worst if not distances[name] <= bound)
    worst = failing[0] if failing else from_worst[0]
    return FactorFit(factors, distances[worst], failing, measured_noise)


def unexplained(fit: FactorFit, step: int, facts: StepFacts) -> Mistake:
    """Return the error for a gradient that no factors explain."""
    return Mistake(
        f"step {step}: the optimizer's gradient is not the gradient of the {facts.rows} "
        f"recorded examples, with a relative difference of {fit.missed:.2g} in "
        f"'{fit.failing[0]}'; {advice_for(facts)}"
    )


def advice_for(facts: StepFacts) -> str:
    """Return the probable reason for an unexplained gradient, and a remedy."""
    if facts.began_with_gradient:
        return (
            "parameters had a gradient before following began, which belongs to no "
            "recorded example; call optimizer.zero_grad() before"
        )
    if not (facts.drew or facts.losses) and (missed := facts.outputs_missed()):
        return (
            "a replay of a call returned other outputs than the loop (relative "
            f"difference {missed:.2g}); {ASK_OTHER_OUTPUTS}"
        )
    if facts.other_outputs:
        others = " or ".join(facts.other_outputs)
        return (
            f"does the loss use {others}, which has no row for each example? Let the "
            "model return the tensors from which the loss is computed"
        )
    if facts.differentiated:
        return ASK_DERIVATIVES
    if facts.losses:
        return f"{ASK_SAME_LOSSES} Does the loss have other terms besides these losses?"
    reason = ASK_DRAWS if facts.drew else ASK_ADDED
    if facts.passes > 1:
        reason = (
            f"a call had {facts.passes} backward passes (torch.autograd.grad?). PCGrad "
            "and GradNorm combine gradients with factors of inner products or norms, "
            "so the result is not the gradient of any loss of the examples; train with "
            "a weighted sum of the losses"
        )
    return reason


def cancels(
    replayed: Weights, consumed: Weights, factor: float, bound: float, noise: Weights
) -> bool:
    """Return True if rounding explains the distance between `factor` times `replayed`
    and `consumed`, for every parameter. `noise` is the measured rounding error of
    `replayed`, which is large if terms of the gradient cancel."""
    for name, part in consumed.items():
        missed = float((factor * replayed[name] - part).norm())
        rounding = 0.0
        if name in noise:
            rounding = NOISE_MULTIPLE * abs(factor) * float(noise[name].norm())
        if not missed <= bound * float(part.norm()) + rounding:
            return False
    return True


def near_power_of_two(factor: float, missed: float) -> float:
    """Return the power of two whose relative distance from `factor` is at most
    `missed`. If there is none, return `factor`.

    >>> near_power_of_two(0.25 + 1e-12, 1e-11), near_power_of_two(0.3, 1e-11)
    (0.25, 0.3)
    """
    if factor <= 0:
        return factor
    power = 2.0 ** round(log2(factor))
    return power if abs(factor - power) <= missed * power else factor


def factor_between(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Return the factor c that minimizes ‖c ours − theirs‖, and the minimum relative to
    ‖theirs‖.

    If squares would underflow, as for examples with a tiny loss,
    compute in double precision.

    >>> factor_between(torch.full((2,), 2e-25), torch.full((2,), 1e-25))
    (0.5, 0.0)
    """
    return factor_of_parts([(ours, theirs)])


def factor_of_parts(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Return `factor_between` of gradients that are given in parts. A concatenation
    could take gigabytes."""
    # ‖ours‖, ‖theirs‖, ours·ours and ours·theirs of each part, in one transfer from the
    # device
    norms = torch._foreach_norm(
        [ours for ours, _ in pairs] + [theirs for _, theirs in pairs]
    )
    squares = [ours @ ours for ours, _ in pairs]
    products = [ours @ theirs for ours, theirs in pairs]
    read = read_numbers([*norms, *squares, *products])
    parts = len(pairs)
    size = hypot(*read[:parts])
    size_of_theirs = hypot(*read[parts : 2 * parts])

    # if squares underflow, compute again in double precision
    count = sum(theirs.numel() for _, theirs in pairs)
    dtype = pairs[0][1].dtype
    underflows = (
        bool(count) and min(size, size_of_theirs) ** 2 < torch.finfo(dtype).tiny / count
    )
    if underflows and dtype != torch.float64:
        return factor_of_parts(
            [(ours.double(), theirs.double()) for ours, theirs in pairs]
        )

    # c = ours·theirs / ours·ours, and ‖c ours − theirs‖ / ‖theirs‖
    square = sum(read[2 * parts : 3 * parts])
    factor = sum(read[3 * parts :]) / square if square else 0.0
    gaps = [
        torch.linalg.vector_norm(multiple(factor, ours) - theirs)
        for ours, theirs in pairs
    ]
    missed = hypot(*read_numbers(gaps))
    return factor, missed / size_of_theirs if size_of_theirs else 0.0


def multiple(factor: float, tensor: Tensor) -> Tensor:
    """Return a tensor times a factor. If the factor is 1, return the tensor itself."""
    return tensor if factor == 1 else factor * tensor


def bound_of(consumed: Weights, tolerance: float) -> float:
    """Return the bound on the relative rounding error of a gradient. `tolerance` is the
    eps of the lower precision under casts, else 0."""
    return max(
        SUM_EPS
        * max((torch.finfo(part.dtype).eps for part in consumed.values()), default=0.0),
        CAST_EPS * tolerance,
    )


# --- Every factor in a loop must be a scale, or come from clipping.


@dataclass(frozen=True, eq=False)
class Multiplied:
    """A group of parameters whose gradients were multiplied by the same factor in one
    step."""

    step: int
    names: tuple[str, ...]
    factor: float
    # squared norm of each parameter's gradient, after the multiplication
    squares: array[float]
    single: bool  # True if all gradients together have at most one nonzero element
    bound: float  # relative rounding error of `factor` and of the norm
    # squared norm of the gradients of the optimizer's tensors outside the model
    square_outside: float = 0.0

    @property
    def with_outside(self) -> Multiplied:
        """This group and the optimizer's tensors outside the model, as one group."""
        squares = array("d", [*self.squares, self.square_outside])
        return replace(self, names=(*self.names, ""), squares=squares)

    @property
    def norm(self) -> float:
        """The norm of the gradient that the optimizer used."""
        return sqrt(sum(self.squares))

    @property
    def tolerance(self) -> float:
        """The largest difference between the norms of two gradients that were clipped
        to the same norm. PyTorch divides by ‖g‖ + 1e-6, so a clipped norm is up to 1e-6
        below the clipping norm."""
        return EQUAL_BOUNDS * self.bound * self.norm + GUARD

    @property
    def mantissa(self) -> float:
        """The factor without its power of two, because
        a GradScaler may change this power."""
        return frexp(self.factor)[0]

    def may_be_clipped(self, other: Multiplied) -> bool:
        """Return True if clipping may explain that this group and `other`, of another
        step, have nearly equal norms.

        If the gradient has a single nonzero element, compare more strictly: clipping by
        norm makes c(‖g‖ + 1e-6) equal in both steps, and clipping by value makes c‖g‖
        equal."""
        if not self.single:
            return self.factor > 0
        by_value = abs(self.norm - other.norm)
        by_norm = abs(
            self.norm + GUARD * self.factor - other.norm - GUARD * other.factor
        )
        return 0 < self.factor < 1 and min(by_norm, by_value) <= (
            RESOLVED_BOUNDS * self.bound * self.norm
        )

    def only(self, names: Iterable[str]) -> Multiplied:
        """Return the part of this group with the parameters `names`."""
        chosen = frozenset(names)
        indices = [index for index, name in enumerate(self.names) if name in chosen]
        squares = array("d", (self.squares[index] for index in indices))
        return replace(
            self, names=tuple(self.names[index] for index in indices), squares=squares
        )


@dataclass(frozen=True)
class ValueBound:
    """The value to which clipping by value reduced elements of a gradient in one
    step."""

    step: int
    value: float
    elements: int  # number of clipped elements
    bound: float  # relative rounding error of `value`

    def is_near(self, value: float) -> bool:
        return nearly_equal(self.value, value, RESOLVED_BOUNDS * self.bound)


@dataclass
class Factors:
    """The factors of all steps so far, except scales."""

    seen: list[Multiplied] = field(default_factory=list)
    clipped_values: list[ValueBound] = field(default_factory=list)

    def take(
        self,
        step: int,
        factors: Mapping[str, float],
        replayed: Weights,
        consumed: Weights,
        bound: float,
        square_outside: float = 0.0,
    ) -> dict[str, float]:
        """Return the factor of each parameter in a step.
        Store all factors that are not scales.

        Args:
            step: index of the step.
            factors: fitted factor of each parameter.
            replayed: gradient of the recorded examples.
            consumed: gradient that the optimizer used.
            bound: bound on the relative rounding error of a gradient.
            square_outside: squared norm of the gradients of tensors outside the model,
                which the loop may have clipped together with these parameters.
        """
        # if all parameters share one factor and it is a scale, there is nothing to
        # store
        first = next(iter(factors.values()), 1.0)
        if all(factor == first for factor in factors.values()) and is_scale(
            first, bound, 1
        ):
            return dict(factors)

        # form groups of parameters with equal factors
        counts = read_numbers([consumed[name].count_nonzero() for name in factors])
        numbers = dict(zip(factors, counts, strict=True))
        chosen = dict(factors)
        groups = [list(factors)]
        if len(set(factors.values())) > 1:
            singles = [name for name in factors if numbers[name] < 2]
            several = {name: factors[name] for name in factors if numbers[name] > 1}
            groups = clusters(several, EQUAL_BOUNDS * bound)
            size = sqrt(sum(float(consumed[name].square().sum()) for name in factors))
            tolerance = bound * size
            for name in singles:
                add_single(name, groups, chosen, replayed, consumed, tolerance)

        # store all factors except scales; `refuse_unexplained` compares them between
        # steps
        for group in groups:
            factor = chosen[group[0]]
            single = sum(numbers[name] for name in group) < 2
            if not is_scale(factor, bound, 1 if single else MAX_MEAN):
                squares = array(
                    "d", read_numbers([consumed[name].square().sum() for name in group])
                )
                names = tuple(group)
                self.seen.append(
                    Multiplied(
                        step, names, factor, squares, single, bound, square_outside
                    )
                )
        return chosen

    def refuse_unexplained(self) -> None:
        """Raise if a factor of a gradient is neither a scale nor caused by clipping."""
        self.refuse_lone_elements()
        clipped = clipped_groups(self.seen)
        # the loop may have clipped them together with tensors outside the model
        together = {
            group.with_outside: group
            for group in self.seen
            if group not in clipped and group.square_outside
        }
        clipped |= {together[group] for group in clipped_groups(tuple(together))}

        # A factor that several steps share, up to a power of two, is a scale. A union of
        # groups that were clipped to known norms is explained, too.
        left = [group for group in self.seen if group not in clipped]
        scales = {group.mantissa for group in scales_among(left)}
        known = {
            frozenset(group.names): group.norm
            for group in sorted(clipped, key=lambda group: group.norm)
        }
        unexplained_groups = [
            group
            for group in left
            if not is_union(group, known)
            and not self.is_clipped_by_value(group)
            and not has_scale(group, scales)
        ]

        # Accept an unexplained factor below 1 as clipping if its parameters have no
        # other unexplained factor in the loop: there is no other step to compare with.
        times = Counter(name for group in unexplained_groups for name in group.names)
        for group in sorted(unexplained_groups, key=lambda group: group.step):
            once = 0 < group.factor < 1 and all(
                times[name] == 1 for name in group.names
            )
            if group.single or not once:
                raise wrong_factor(group)

    def is_clipped_by_value(self, group: Multiplied) -> bool:
        """Return True if a single element was clipped to the value of another step."""
        is_shorter = group.single and 0 < group.factor < 1
        return is_shorter and any(
            one.is_near(group.norm) for one in self.clipped_values
        )

    def refuse_lone_elements(self) -> None:
        """Raise if a step reduced one element only, to a value that no other step has.

        Clipping by value is recognised if several elements equal the bound, or if
        several steps have the same bound. If a single element was reduced, anything
        else may have reduced it. But if only one step of the loop was clipped, there
        is no bound to compare with, and the step is accepted."""
        for one in self.clipped_values:
            others = [other for other in self.clipped_values if other is not one]
            if (
                one.elements == 1
                and others
                and not any(other.is_near(one.value) for other in others)
            ):
                raise Mistake(
                    f"step {one.step}: the optimizer's gradient is not the gradient of "
                    "the recorded examples: one element was reduced to "
                    f"{one.value:.4g}, and no other step clips by value to this bound; "
                    f"{WHAT_ADDED}"
                )


def add_single(
    name: str,
    groups: list[list[str]],
    factors: dict[str, float],
    replayed: Weights,
    consumed: Weights,
    tolerance: float,
) -> None:
    """Add a parameter whose gradient has at most one nonzero element to a group, or to
    a new group of its own.

    Such a gradient has a factor by chance, which proves nothing. But the parameter may
    have been clipped together with a group. It gets the factor of the group that fits
    best, if the remaining distance is at most `tolerance`, the rounding error of the
    whole gradient."""
    distances = [
        float((factors[group[0]] * replayed[name] - consumed[name]).norm())
        for group in groups
    ]
    if not groups or not min(distances) <= tolerance:
        groups.append([name])
        return
    group = groups[distances.index(min(distances))]
    factors[name] = factors[group[0]]
    group.append(name)


def clipped_groups(groups: Sequence[Multiplied]) -> set[Multiplied]:
    """Return the groups whose norm is a clipping norm, which several steps share."""
    clipped = set[Multiplied]()
    for group, ends in shared(
        groups, lambda group: group.norm, lambda group: group.tolerance
    ):
        others = [other for other in ends if other is not group]
        if others and all(map(group.may_be_clipped, others)):
            clipped.add(group)
    return clipped


def wrong_factor(group: Multiplied) -> Mistake:
    """Return the error for a factor that is neither a scale nor caused by clipping."""
    more = ""
    if len(group.names) > 1:
        more = f" and {counted(len(group.names) - 1, 'parameter')} more"
    reason = (
        "which is neither a scale nor clipping to the norm of another step (were "
        "gradients of another model clipped together with these?)"
    )
    if group.single:
        reason = (
            "a single number, and no group of parameters that was clipped with it has "
            "this factor"
        )
    return Mistake(
        f"step {group.step}: the optimizer's gradient is not the gradient of the "
        f"recorded examples: in '{group.names[0]}'{more} it is {group.factor:.4g} "
        f"times that gradient, {reason}; {WHAT_ADDED}"
    )


def has_scale(group: Multiplied, scales: Iterable[float]) -> bool:
    """Return True if the factor is below 1, and equal to one of `scales` up to a power
    of two."""
    if not 0 < group.factor < 1:
        return False
    tolerance = EQUAL_BOUNDS * group.bound
    return any(nearly_equal(group.mantissa, scale, tolerance) for scale in scales)


def scales_among(groups: Sequence[Multiplied]) -> Iterator[Multiplied]:
    """Yield the groups whose factor is below 1 and occurs in several steps, up to a
    power of two.

    For gradients with a single nonzero element, the factor
    must occur in almost all steps."""
    for single, min_share in ((False, COMMON_SHARE), (True, 1 - COMMON_SHARE)):
        for group, ends in shared(
            [group for group in groups if group.single == single],
            lambda group: group.mantissa,
            lambda group: EQUAL_BOUNDS * group.bound,
            min_share,
        ):
            is_repeated = any(other.step != group.step for other in ends)
            if is_repeated and 0 < group.factor < 1:
                yield group


def shared(
    groups: Sequence[Multiplied],
    value: Callable[[Multiplied], float],
    tolerance: Callable[[Multiplied], float],
    min_share: float = COMMON_SHARE,
) -> Iterator[tuple[Multiplied, tuple[Multiplied, ...]]]:
    """Yield each group, with the first and the last group of equal value, up to the
    tolerance.

    Yield () instead of these two if fewer than two groups have this value, or fewer
    than the fraction `min_share` of a parameter's groups. A few values are nearly equal
    by chance.

    Args:
        groups: groups of all steps.
        value: function that returns the value of a group.
        tolerance: function that returns the tolerance of this value.
        min_share: smallest fraction of a parameter's groups.
    """
    ordered = sorted(groups, key=value)
    values = [value(group) for group in ordered]
    times = Counter(name for group in ordered for name in group.names)
    for group, center in zip(ordered, values, strict=True):
        first = bisect_left(values, center - tolerance(group))
        stop = bisect_right(values, center + tolerance(group))
        count = min(times[name] for name in group.names)
        ends: tuple[Multiplied, ...] = ()
        if stop - first >= max(2.0, min_share * count):
            ends = (ordered[first], ordered[stop - 1])
        yield group, ends


def clusters(factors: Mapping[str, float], tolerance: float) -> list[list[str]]:
    """Group the names whose factors are equal up to rounding.

    >>> clusters({"a": 0.5, "b": 1.0, "c": 0.5}, 1e-9)
    [['a', 'c'], ['b']]
    """
    groups: list[list[str]] = []
    for name in sorted(factors, key=lambda name: factors[name]):
        if groups and nearly_equal(factors[groups[-1][0]], factors[name], tolerance):
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def is_union(group: Multiplied, known: Mapping[frozenset[str], float]) -> bool:
    """Return True if a group is a union of groups that were clipped to their `known`
    norms. One part of the union may be missing in `known`, if its norm is one of the
    known norms."""
    rest = group
    if group.single or group.factor < 0:
        return False
    for names, norm in known.items():
        part = rest.only(names)
        if len(part.names) == len(names) and abs(part.norm - norm) <= part.tolerance:
            rest = rest.only(name for name in rest.names if name not in names)
    if rest is group:
        return not group.names
    norms = known.values()
    return not rest.names or any(
        abs(rest.norm - norm) <= rest.tolerance for norm in norms
    )


def nearly_equal(one: float, other: float, tolerance: float) -> bool:
    """Return True if two numbers are equal up to the relative tolerance."""
    return abs(one - other) <= tolerance * max(abs(one), abs(other))


def is_scale(factor: float, bound: float, most: int = MAX_MEAN) -> bool:
    """Return True if the factor is 0, a power of two, or 2^k/n < 1 with n ≤ `most`.

    >>> [is_scale(factor, 1e-9) for factor in (1.0, 2.0**-10, 1 / 3, 2.0, 0.3, 3.0, -1.0, 0.0)]
    [True, True, True, True, False, False, False, True]
    """
    if factor <= 0:
        return factor == 0
    largest = 1
    if factor < 1:
        largest = int(min(most, max(1.0, RARE_SHARE / bound)))
    # 2^k/n with an even n equals 2^j/m with an odd m, so try odd n only
    for n in range(1, largest + 1, 2):
        # factor · n = mantissa · 2^k with 1/2 ≤ mantissa < 1. Up to rounding, it is a
        # power of two if the mantissa is nearly 1/2 or nearly 1.
        mantissa, _ = frexp(factor * n)
        if 2 * mantissa - 1 <= bound or 1 - mantissa <= bound:
            return True
    return False


def moved_by_units(factor: float, units: int, kind: torch.dtype) -> float:
    """Return the floating-point number that is `units` steps above `factor` in a dtype.

    >>> moved_by_units(1.0, 2, torch.float32) == 1 + 2 * torch.finfo(torch.float32).eps
    True
    """
    near = torch.tensor(factor, dtype=kind)
    toward = torch.tensor(inf if units > 0 else -inf, dtype=kind)
    for _ in range(abs(units)):
        near = torch.nextafter(near, toward)
    return near.item()
