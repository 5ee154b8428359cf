"""Data: what is learned, and where the network is read.

Scaling, gaps, noise and phases come first: what is done to inputs and targets of any source.

Missing inputs, marked by NaN, are replaced by the mean of their feature over the training split.

>>> rows = torch.tensor([[1.0, 5.0], [float("nan"), 7.0], [3.0, 9.0]])
>>> filled(rows, means(rows)).tolist()
[[1.0, 5.0], [2.0, 7.0], [3.0, 9.0]]

Noise on the training targets.

Of class labels, exactly the given share (rounded) is replaced by another class, each of the others being as likely.
Real targets get Gaussian noise whose standard deviation is the given share of theirs.

>>> clean = torch.zeros(10, dtype=torch.int64)
>>> noisy(clean, 3, 0.2, torch.Generator().manual_seed(0)).count_nonzero().item()
2

Phases of learning: which examples belong to each, how many each split takes of it, and whether one tells of another.

>>> [share(128, number, 3) for number in range(3)]
[43, 43, 42]
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, final

import torch
from jaxtyping import Float, Int, UInt8
from pydantic import Field
from torch import Tensor

from ntkexp.component import Component, Count, CountOrNone
from ntkexp.mistake import Mistake
from ntkexp.stream import stream

Standardise = Literal["each", "all", "none"]


@dataclass(frozen=True)
class Scale:
    """Standardising: mean 0 and deviation 1, measured on the training split and applied to all.

    A mean and a deviation, which broadcast over examples.

        z = (x − mean) / deviation,    deviation² = mean (x − mean)²

    A feature that does not vary in training becomes 0 everywhere: what it does elsewhere could not have been learned.

    >>> measured = each(torch.tensor([[1.0, 4.0], [3.0, 4.0]], dtype=torch.float64))
    >>> measured(torch.tensor([[5.0, 6.0]], dtype=torch.float64)).tolist()
    [[3.0, 0.0]]
    """

    mean: Float[Tensor, "..."]
    deviation: Float[Tensor, "..."]

    def __call__(self, values: Float[Tensor, "example *shape"]) -> Float[Tensor, "example *shape"]:
        return torch.where(self.deviation > 0, (values - self.mean) / self.deviation, 0.0)


def each(values: Float[Tensor, "example *shape"]) -> Scale:
    """Measure the scale of every feature by itself."""
    return measure(values, (0,))


def whole(values: Float[Tensor, "example *shape"]) -> Scale:
    """Measure the scale of all features alike, so that a pixel stays brighter than another."""
    return measure(values, tuple(range(values.ndim)))


def unchanged(values: Tensor) -> Callable[[Tensor], Tensor]:
    """No scale at all."""
    return torch.clone


def measure(values: Float[Tensor, "example *shape"], axes: tuple[int, ...]) -> Scale:
    """Mean and deviation over these axes."""
    mean = values.mean(axes, keepdim=True)
    deviation = (values - mean).square().mean(axes, keepdim=True).sqrt()
    # The deviation of equal numbers need not round to zero; their extremes are equal.
    varies = values.amax(axes, keepdim=True) > values.amin(axes, keepdim=True)
    if (varies & ~((deviation > 0) & deviation.isfinite())).any():
        raise Mistake("some numbers are too large or too small for a variance in double precision; change their unit")
    return Scale(mean, torch.where(varies, deviation, 0.0))


MEASURES: dict[Standardise, Callable[[Tensor], Callable[[Tensor], Tensor]]] = {
    "each": each,
    "all": whole,
    "none": unchanged,
}


def means(train: Float[Tensor, "example *shape"]) -> Float[Tensor, " *shape"]:
    """The mean of each feature over the examples that have it."""
    mean = train.nanmean(0)
    if mean.isnan().any():
        first = int(mean.isnan().flatten().nonzero()[0]) + 1
        raise Mistake(
            f"data.missing=mean: feature {first} (the target not counted) has no value in any of the {len(train)} "
            "training rows, so it has no mean; raise data.train, or remove the column"
        )
    return mean


def filled(values: Float[Tensor, "example *shape"], fill: Float[Tensor, " *shape"]) -> Float[Tensor, "example *shape"]:
    """The values, with the fill where one is missing."""
    return torch.where(values.isnan(), fill, values)


def noisy(
    target: Int[Tensor, " example"] | Float[Tensor, "example value"],
    classes: int,
    share: float,
    generator: torch.Generator,
) -> Tensor:
    """Add a share of noise to targets: labels are replaced, or, where there are no classes, numbers are added."""
    return relabelled(target, classes, share, generator) if classes else blurred(target, share, generator)


def relabelled(
    labels: Int[Tensor, " example"], classes: int, share: float, generator: torch.Generator
) -> Int[Tensor, " example"]:
    """A share of labels is replaced: a step of 1 … classes − 1 around the circle of classes never ends where it
    began.
    """
    chosen = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    step = torch.randint(1, max(classes, 2), chosen.shape, generator=generator)
    return labels.index_copy(0, chosen, (labels[chosen] + step) % classes)


def blurred(
    values: Float[Tensor, "example value"], share: float, generator: torch.Generator
) -> Float[Tensor, "example value"]:
    """Add noise to values: y + share · deviation · N(0, 1)."""
    noise = torch.randn(values.shape, generator=generator, dtype=values.dtype)
    return values + share * values.std(0, correction=0) * noise


def share(count: int, number: int, phases: int) -> int:
    """How many of so many examples, or steps, are of a phase: equal shares, the first ones larger by one if need be."""
    return count // phases + (number < count % phases)


def positions(phase: Int[Tensor, " example"] | None, phases: int, count: int) -> list[Int[Tensor, " chosen"]]:
    """Where the examples of each phase are, of so many in all.

    >>> [place.tolist() for place in positions(torch.tensor([0, 1, 0]), 2, 3)]
    [[0, 2], [1]]
    >>> [place.tolist() for place in positions(None, 1, 3)]
    [[0, 1, 2]]
    """
    if phase is None:
        return [torch.arange(count)]
    return [(phase == number).nonzero()[:, 0] for number in range(phases)]


def leaked(
    learned: tuple[Float[Tensor, "example *shape"], Int[Tensor, " example"]],
    read: tuple[Float[Tensor, "other *shape"], Int[Tensor, " other"]],
) -> tuple[int, int] | None:
    """Find two phases of which one learns what the other reads, given examples and their phases.

    >>> rows, phase = torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1])
    >>> leaked((rows, phase), (torch.tensor([[2.0]]), torch.tensor([0])))
    (1, 0)
    >>> leaked((rows, phase), (torch.tensor([[2.0]]), torch.tensor([1])))
    """
    known: dict[bytes, set[int]] = {}
    for row, phase in zip(learned[0], learned[1].tolist(), strict=True):
        known.setdefault(row.numpy().tobytes(), set()).add(phase)
    for row, phase in zip(read[0], read[1].tolist(), strict=True):
        if others := known.get(row.numpy().tobytes(), set()) - {phase}:
            return min(others), phase
    return None


# --- Data: what is learned, and where the network is read.
#
# A source yields examples; three splits are cut from them that share no example: `train`, `probe` and `test`. The
# order of the examples and their noise come from the source's seed, each from a stream of its own; inputs, and
# real targets, are standardised with the statistics of the training split alone:
#
#     x ← (x − mean) / deviation
#
# A source may say instead that its examples stay as they are given: in its own order, and with targets in their
# own unit. Or that they come in phases, which are learned one after the other: then every split holds the phases
# in their order.


@dataclass(frozen=True)
class Examples:
    """Inputs as a person would look at them, with what is to be learned: class labels, or real values.

    Pixels may stay bytes, of which `white` make a one: a whole image set as float64 would fill a laptop.
    """

    inputs: Float[Tensor, "example *shape"] | UInt8[Tensor, "example *shape"]
    target: Int[Tensor, " example"] | Float[Tensor, "example value"]
    classes: tuple[str, ...] = ()  # names of the classes; none for regression
    white: float = 1.0
    gaps: bool = False  # NaN marks a missing input, for which the mean of the training split is put
    vocabulary: int = 0  # unless it is 0, inputs are tokens: whole numbers below it
    one_hot: int = 0  # unless it is 0, inputs are tokens below it, encoded once it is known which are used
    as_given: bool = False  # their order and the unit of their targets are the source's own
    phases: tuple[str, ...] = ()  # names of the phases in which they are learned; none if all are learned at once
    phase: Int[Tensor, " example"] | None = None  # of these, the one of each example, in order
    phase_classes: tuple[tuple[str, ...], ...] = ()  # what each calls its classes, where phases share the outputs


@dataclass(frozen=True)
class Split:
    """One part of the data. `index` says which examples of the source these are."""

    shown: Float[Tensor, "example *shape"]
    inputs: Float[Tensor, "example *shape"]
    target: Int[Tensor, " example"] | Float[Tensor, "example value"]
    index: Int[Tensor, " example"]
    phase: Int[Tensor, " example"] | None = None  # in which each is learned, where there are several, in order


@dataclass(frozen=True)
class Data:
    """Three splits without a common example."""

    train: Split
    probe: Split
    test: Split
    classes: tuple[str, ...]
    vocabulary: int = 0
    phases: tuple[str, ...] = ()
    phase_classes: tuple[tuple[str, ...], ...] = ()


class AbstractSource(Component):
    """Examples, and how many of them each split gets; where `test` is None it gets the rest."""

    train: Count = 128
    probe: CountOrNone = 128
    test: CountOrNone | None = None
    seed: int | None = Field(None, ge=0, lt=2**63)  # None: whatever seed the whole experiment has
    label_noise: float = Field(0.0, ge=0, lt=1)
    standardise: Standardise = "each"

    @abstractmethod
    def examples(self, generator: torch.Generator) -> Examples:
        """Draw all examples, in any order; whatever is random comes from the generator."""

    def phase_steps(self, steps: int) -> tuple[int, ...]:
        """How many of so many steps are taken on each phase; most sources have one."""
        return (steps,)

    @final
    def split(self, seed: int = 0) -> Data:
        """Put the examples in random order, cut them, add noise to the training targets, and standardise.

        By this seed, unless the source has its own. The same bits for any number of threads: kernel files know their
        data by them.
        """
        with one_thread():
            return self.drawn(seed if self.seed is None else self.seed)

    @final
    def drawn(self, seed: int) -> Data:
        """The data of a seed, by as many threads as there are."""
        examples = self.examples(examples_stream(seed))
        refuse_infinite(examples)
        train, *others = (part(examples, index) for index in self.cut(examples, seed))
        if examples.as_given:
            return self.standardised((train, *others), examples)
        refuse_leaks(train, others)
        refuse_constant(train)  # before the noise, which would hide it, and after, lest it is the noise's doing
        noise = stream("noise", seed)
        train = replace(train, target=noisy(train.target, len(examples.classes), self.label_noise, noise))
        refuse_constant(train)
        return self.standardised((train, *others), examples)

    @final
    def cut(self, examples: Examples, seed: int) -> tuple[Tensor, ...]:
        """Cut the positions of the examples into the three splits, in random order; of each phase an equal share."""
        groups = positions(examples.phase, len(examples.phases), len(examples.inputs))
        splits: list[tuple[Tensor, ...]] = []
        for number, group in enumerate(groups):
            order = torch.arange(len(group))
            if not examples.as_given:
                order = torch.randperm(len(group), generator=stream("order", seed))
            splits.append(self.cut_one(group[order], number, len(groups)))
        return tuple(torch.cat(parts) for parts in zip(*splits, strict=True))

    @final
    def cut_one(self, order: Int[Tensor, " example"], number: int, phases: int) -> tuple[Tensor, ...]:
        """Cut the positions of one of so many phases in this order."""
        train, probe = share(self.train, number, phases), share(self.probe, number, phases)
        test = None if self.test is None else share(self.test, number, phases)
        asked = train + probe + (test or 0)
        if asked > len(order):
            given = "" if self.test is None else f", data.test={self.test}"
            of = f" of phase {number + 1}" if phases > 1 else ""
            raise Mistake(
                f"data.train={self.train}, data.probe={self.probe}{given} ask for {asked} examples{of}, and there are "
                f"{len(order)}; lower one of them"
            )
        if not train:
            raise Mistake(f"data.train={self.train}: that is no example for some of {phases} phases; raise data.train")
        return order[:train], order[train : train + probe], order[train + probe : None if test is None else asked]

    @final
    def standardised(self, splits: tuple[Split, ...], examples: Examples) -> Data:
        """Standardise the splits as the network gets them; every statistic is one of the first."""
        if examples.gaps:
            fill = means(splits[0].shown)
            splits = tuple(replace(split, shown=filled(split.shown, fill)) for split in splits)
        scale = MEASURES[self.standardise](splits[0].shown)
        whole = bool(examples.classes) or examples.as_given
        rescale = unchanged(splits[0].target) if whole else each(splits[0].target)
        train, probe, test = (replace(s, inputs=scale(s.shown), target=rescale(s.target)) for s in splits)
        return Data(
            train=train,
            probe=probe,
            test=test,
            classes=examples.classes,
            vocabulary=examples.vocabulary,
            phases=examples.phases,
            phase_classes=examples.phase_classes,
        )


def examples_stream(seed: int) -> torch.Generator:
    """What examples are drawn from."""
    return stream("examples", seed)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread computes, so that sums are rounded in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def part(examples: Examples, index: Int[Tensor, " example"]) -> Split:
    """The examples at these positions, in double precision, still as a person would look at them."""
    inputs = examples.inputs[index]
    if examples.one_hot:
        inputs = torch.nn.functional.one_hot(inputs.long(), examples.one_hot)
    shown = inputs.double() / examples.white
    target = examples.target[index]
    phase = None if examples.phase is None else examples.phase[index]
    return Split(shown, shown, target.long() if examples.classes else target.double(), index, phase)


def refuse_infinite(examples: Examples) -> None:
    """Numbers that are no numbers would spoil every kernel, silently."""
    fine = examples.inputs.isfinite()
    if examples.gaps:
        fine |= examples.inputs.isnan()
    for name, bad in (("input", ~fine), ("target", ~examples.target.isfinite())):
        if bad.any():
            first = int(bad.nonzero()[0, 0])
            raise Mistake(f"the {name} of example {first} (counting from 0) is not finite; remove or repair it")


def refuse_leaks(train: Split, others: Sequence[Split]) -> None:
    """What is learned in one phase must not be what another is read at."""
    if train.phase is None:
        return
    for split in others:
        assert split.phase is not None
        if (found := leaked((train.shown, train.phase), (split.shown, split.phase))) is not None:
            learned, read = found
            raise Mistake(
                f"data.phases: an example that is learned in phase {learned + 1} is read, but not learned, in phase "
                f"{read + 1}; choose phases without common examples, or with the same ones and the same seed"
            )


def refuse_constant(train: Split) -> None:
    """One class, or one value, leaves nothing to learn and no scale, in whatever phase."""
    phases = 1 if train.phase is None else int(train.phase.max()) + 1
    for number, group in enumerate(positions(train.phase, phases, len(train.target))):
        target = train.target[group]
        if (target == target[:1]).all(0).any():
            of = f" of phase {number + 1}" if phases > 1 else ""
            raise Mistake(
                f"data.train={len(train.target)}: every training example{of} has the same target, so there is nothing "
                "to learn; raise data.train, or try another data.seed, data.classes or data.target"
            )
