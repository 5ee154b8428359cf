"""Data: what is learned, and where the network is read.

A source yields examples; three splits are cut from them that share no example: `train`, `probe` and `test`. The order
of the examples and their noise come from the source's seed, each
from a stream of its own; inputs, and real targets, are standardised with the statistics of the training split alone:

    x ← (x − mean) / deviation

A source may say instead that its examples stay as they are given: in its own order, and with targets in their own unit.
Or that they come in phases, which are learned one after the other: then every split holds the phases in their order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float, Int, UInt8
from pydantic import Field
from torch import Tensor

from ntkexp.component import Component, Count, CountOrNone
from ntkexp.data.gaps import filled, means
from ntkexp.data.noise import noisy
from ntkexp.data.phases import leaked, positions, share
from ntkexp.data.scale import MEASURES, Standardise, each, unchanged
from ntkexp.mistake import Mistake
from ntkexp.stream import stream


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
