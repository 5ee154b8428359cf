"""Data: what is learned, and where the network is read.

A source yields examples; three splits are cut from them that share no example: `train`, `probe` and `test`. The order
of the examples and their noise come from the source's seed, each from a stream of its own; inputs, and real targets,
are standardised with the statistics of the training split alone:

    x ← (x − mean) / deviation,    deviation² = mean (x − mean)²

A source may say instead that its examples stay as they are given: in its own order, and with targets in their own unit.
Or that they come in phases, which are learned one after the other: then every split holds the phases in their order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, final

import torch
from jaxtyping import Float, Int, UInt8
from pydantic import AfterValidator, Field
from torch import Tensor

from ntkexp.component import Component, Count, CountOrNone
from ntkexp.mistake import Mistake, nearest_file, refuse_special
from ntkexp.stream import stream

LARGEST = 1 << 34
"""Bytes of a file of data, all of which are read into memory."""


def expand_home(path: Path) -> Path:
    """`~` as the shell means it."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise Mistake(f"{quoted(path)}: there is no such home folder") from error


UserPath = Annotated[Path, AfterValidator(expand_home)]
"""A path on the command line or in YAML."""


def quoted(path: Path) -> str:
    """The key and its value, which is quoted, because a file name may hold blanks and line breaks."""
    return f"data.path={str(path)!r}"


def is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:
        raise unreadable(path, error) from error


def require_file(path: Path) -> Path:
    try:
        folder, exists = path.is_dir(), path.exists()
        beside = path.parent.iterdir() if path.parent.is_dir() and not exists else ()
        siblings = [entry.name for entry in beside if entry.is_file()]
    except OSError as error:
        raise unreadable(path, error) from error
    if folder:
        raise Mistake(f"{quoted(path)} is a folder; name the file")
    if not exists:
        raise Mistake(
            f"{quoted(path)}: there is no such file{one_line(nearest_file(path.name, siblings))}"
        )
    refuse_special(path, quoted(path), LARGEST)
    return path


def read_contents(path: Path) -> bytes:
    """Read the bytes of a file, as many as it says: of those in /proc, which say 0, some never end."""
    try:
        with require_file(path).open("rb") as file:
            return file.read(path.stat().st_size)
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> Mistake:
    """The mistake of a file that cannot be read, with what the operating system says."""
    return Mistake(f"{quoted(path)} cannot be read: {error.strerror}")


def one_line(text: str) -> str:
    """The text with line breaks as they are written in Python."""
    return text.replace("\r", "\\r").replace("\n", "\\n")


Standardise = Literal["each", "all", "none"]
"""Every feature by itself; all features alike, so that a pixel stays brighter than another; not at all."""

# --- What is done to inputs and targets of any source: scaling, gaps, noise.


def scale_of(how: Standardise, values: Tensor) -> Callable[[Tensor], Tensor]:
    """Standardising, measured on these values: mean 0 and deviation 1.

    A feature that does not vary in training becomes 0 everywhere: what it does elsewhere could not have been learned.

    >>> measured = scale_of("each", torch.tensor([[1.0, 4.0], [3.0, 4.0]], dtype=torch.float64))
    >>> measured(torch.tensor([[5.0, 6.0]], dtype=torch.float64)).tolist()
    [[3.0, 0.0]]
    """
    if how == "none":
        return torch.clone
    axes = (0,) if how == "each" else tuple(range(values.ndim))
    mean = values.mean(axes, keepdim=True)
    deviation = (values - mean).square().mean(axes, keepdim=True).sqrt()
    # The deviation of equal numbers need not round to zero; their extremes are equal.
    varies = values.amax(axes, keepdim=True) > values.amin(axes, keepdim=True)
    if (varies & ~((deviation > 0) & deviation.isfinite())).any():
        raise Mistake(
            "some numbers are too large or too small for a variance in double precision; change their unit"
        )
    return lambda x: torch.where(varies, (x - mean) / deviation, 0.0)


def column_means(train: Float[Tensor, "example *shape"]) -> Float[Tensor, " *shape"]:
    """The mean of each feature over the examples that have it, which is put where it is missing (NaN).

    >>> column_means(torch.tensor([[1.0, 5.0], [float("nan"), 7.0], [3.0, 9.0]])).tolist()
    [2.0, 7.0]
    """
    mean = train.nanmean(0)
    if mean.isnan().any():
        first = int(mean.isnan().flatten().nonzero()[0]) + 1
        raise Mistake(
            f"data.missing=mean: feature {first} (the target not counted) has no value in any of the {len(train)} "
            "training rows, so it has no mean; raise data.train, or remove the column"
        )
    return mean


def add_label_noise(
    target: Int[Tensor, " example"] | Float[Tensor, "example value"],
    classes: int,
    share: float,
    generator: torch.Generator,
) -> Tensor:
    """Add noise to training targets: labels are replaced, or, where there are no classes, numbers are added.

    Of class labels, exactly the given share (rounded) is replaced by another class, each of the others being as likely.
    Real targets get Gaussian noise whose standard deviation is the given share of theirs.

    >>> clean = torch.zeros(10, dtype=torch.int64)
    >>> add_label_noise(clean, 3, 0.2, torch.Generator().manual_seed(0)).count_nonzero().item()
    2
    """
    if not classes:  # y + share · deviation · N(0, 1)
        noise = torch.randn(target.shape, generator=generator, dtype=target.dtype)
        return target + share * target.std(0, correction=0) * noise
    # a step of 1 … classes − 1 around the circle of classes never ends where it began
    chosen = torch.randperm(len(target), generator=generator)[: round(share * len(target))]
    step = torch.randint(1, max(classes, 2), chosen.shape, generator=generator)
    return target.index_copy(0, chosen, (target[chosen] + step) % classes)


# --- Phases of learning: which examples belong to each, how many each split takes, and whether one tells of another.


def share(count: int, number: int, phases: int) -> int:
    """How many of `count` examples, or steps, are of a phase: equal shares, the first ones larger by one if need be.

    >>> [share(128, number, 3) for number in range(3)]
    [43, 43, 42]
    """
    return count // phases + (number < count % phases)


def phase_positions(
    phase: Int[Tensor, " example"] | None, phases: int, count: int
) -> list[Int[Tensor, " chosen"]]:
    """Where the examples of each phase are, of `count` in all.

    >>> [place.tolist() for place in phase_positions(torch.tensor([0, 1, 0]), 2, 3)]
    [[0, 2], [1]]
    >>> [place.tolist() for place in phase_positions(None, 1, 3)]
    [[0, 1, 2]]
    """
    if phase is None:
        return [torch.arange(count)]
    return [(phase == number).nonzero()[:, 0] for number in range(phases)]


def find_leak(
    learned: tuple[Float[Tensor, "example *shape"], Int[Tensor, " example"]],
    read: tuple[Float[Tensor, "other *shape"], Int[Tensor, " other"]],
) -> tuple[int, int] | None:
    """Find two phases of which one learns what the other reads, given examples and their phases.

    >>> rows, phase = torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1])
    >>> find_leak((rows, phase), (torch.tensor([[2.0]]), torch.tensor([0])))
    (1, 0)
    >>> find_leak((rows, phase), (torch.tensor([[2.0]]), torch.tensor([1])))
    """
    seen: dict[bytes, set[int]] = {}
    for row, phase in zip(learned[0], learned[1].tolist(), strict=True):
        seen.setdefault(row.numpy().tobytes(), set()).add(phase)
    for row, phase in zip(read[0], read[1].tolist(), strict=True):
        if others := seen.get(row.numpy().tobytes(), set()) - {phase}:
            return min(others), phase
    return None


# --- Examples, splits, and the source that makes both.


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
    one_hot: int = (
        0  # unless it is 0, inputs are tokens below it, encoded once it is known which are used
    )
    as_given: bool = False  # their order and the unit of their targets are the source's own
    phases: tuple[
        str, ...
    ] = ()  # names of the phases in which they are learned; none if all are learned at once
    phase: Int[Tensor, " example"] | None = None  # of these, the one of each example, in order
    phase_classes: tuple[
        tuple[str, ...], ...
    ] = ()  # what each calls its classes, where phases share the outputs

    def refuse_infinite(self) -> None:
        """Numbers that are not numbers would spoil every kernel, silently."""
        fine = self.inputs.isfinite()
        if self.gaps:
            fine |= self.inputs.isnan()
        for name, bad in (("input", ~fine), ("target", ~self.target.isfinite())):
            if bad.any():
                first = int(bad.nonzero()[0, 0])
                raise Mistake(
                    f"the {name} of example {first} (counting from 0) is not finite; remove or repair it"
                )

    def part(self, index: Int[Tensor, " chosen"]) -> Split:
        """The examples at these positions, in double precision, still as a person would look at them."""
        inputs = self.inputs[index]
        if self.one_hot:
            inputs = torch.nn.functional.one_hot(inputs.long(), self.one_hot)
        shown = inputs.double() / self.white
        target = self.target[index]
        phase = None if self.phase is None else self.phase[index]
        return Split(shown, shown, target.long() if self.classes else target.double(), index, phase)


@dataclass(frozen=True)
class Split:
    """One part of the data. `index` says which examples of the source these are."""

    shown: Float[Tensor, "example *shape"]
    inputs: Float[Tensor, "example *shape"]
    target: Int[Tensor, " example"] | Float[Tensor, "example value"]
    index: Int[Tensor, " example"]
    phase: Int[Tensor, " example"] | None = (
        None  # in which each is learned, where there are several, in order
    )


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
        """How many of the steps are taken on each phase; most sources have one."""
        return (steps,)

    @final
    def split(self, seed: int = 0) -> Data:
        """Put the examples in random order, cut them, add noise to the training targets, and standardise.

        By this seed, unless the source has its own. The same bits for any number of threads: kernel files know their
        data by them.
        """
        seed = seed if self.seed is None else self.seed
        with one_thread():
            examples = self.examples(examples_stream(seed))
            examples.refuse_infinite()
            train, *others = (examples.part(index) for index in self.cut(examples, seed))
            if not examples.as_given:
                refuse_leaks(train, others)
                refuse_constant(
                    train
                )  # before the noise, which would hide it, and after, lest it is the noise's doing
                noise = stream("noise", seed)
                train = replace(
                    train,
                    target=add_label_noise(
                        train.target, len(examples.classes), self.label_noise, noise
                    ),
                )
                refuse_constant(train)
            return self.standardised([train, *others], examples)

    @final
    def cut(self, examples: Examples, seed: int) -> tuple[Tensor, ...]:
        """Cut the positions of the examples into the three splits, in random order; of each phase an equal share."""
        groups = phase_positions(examples.phase, len(examples.phases), len(examples.inputs))
        splits: list[tuple[Tensor, ...]] = []
        for number, group in enumerate(groups):
            # each phase in an order of its own, the same for every seed of the weights
            order = group
            if not examples.as_given:
                order = group[torch.randperm(len(group), generator=stream("order", seed))]
            train, probe = (
                share(self.train, number, len(groups)),
                share(self.probe, number, len(groups)),
            )
            test = None if self.test is None else share(self.test, number, len(groups))
            # the first examples train, the next are probes, and the rest, or as many as are given, test
            end = train + probe + (test or 0)
            of_phase = f" of phase {number + 1}" if len(groups) > 1 else ""
            if end > len(order):
                given = "" if self.test is None else f", data.test={self.test}"
                raise Mistake(
                    f"data.train={self.train}, data.probe={self.probe}{given} ask for {end} examples{of_phase}, and "
                    f"there are {len(order)}; lower one of them"
                )
            if not train:
                few = f"data.train={self.train}: it leaves some of the {len(groups)} phases without an example"
                raise Mistake(f"{few}; raise data.train")
            rest = order[train + probe :] if test is None else order[train + probe : end]
            splits.append((order[:train], order[train : train + probe], rest))
        return tuple(torch.cat(parts) for parts in zip(*splits, strict=True))

    @final
    def standardised(self, splits: Sequence[Split], examples: Examples) -> Data:
        """Standardise the splits as the network gets them; every statistic is one of the first."""
        if examples.gaps:
            fill = column_means(splits[0].shown)
            splits = [
                replace(split, shown=torch.where(split.shown.isnan(), fill, split.shown))
                for split in splits
            ]
        scale = scale_of(self.standardise, splits[0].shown)
        rescale = scale_of(
            "none" if examples.classes or examples.as_given else "each", splits[0].target
        )
        train, probe, test = (
            replace(s, inputs=scale(s.shown), target=rescale(s.target)) for s in splits
        )
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


def refuse_leaks(train: Split, others: Sequence[Split]) -> None:
    """What is learned in one phase must not be what another is read at."""
    for split in others if train.phase is not None else ():
        assert train.phase is not None
        assert split.phase is not None
        if (found := find_leak((train.shown, train.phase), (split.shown, split.phase))) is not None:
            learned, read = found
            raise Mistake(
                f"data.phases: an example that is learned in phase {learned + 1} is read, but not learned, in phase "
                f"{read + 1}; choose phases without common examples, or with the same ones and the same seed"
            )


def refuse_constant(train: Split) -> None:
    """One class, or one value, leaves nothing to learn and no scale, in whatever phase."""
    phases = 1 if train.phase is None else int(train.phase.max()) + 1
    for number, group in enumerate(phase_positions(train.phase, phases, len(train.target))):
        target = train.target[group]
        if (target == target[:1]).all(0).any():
            of = f" of phase {number + 1}" if phases > 1 else ""
            raise Mistake(
                f"data.train={len(train.target)}: every training example{of} has the same target, so there is nothing "
                "to learn; raise data.train, or try another data.seed, data.classes or data.target"
            )
