"""Data: training examples, queries and test examples.

A source returns examples, and `split` cuts three disjoint splits from them: `train`, `query` (the
queries) and `test`. The source's seed determines the order of the examples and the noise, from
separate random streams. Inputs and real targets are standardised with the statistics of the
training split:

    x ← (x − mean) / deviation,    deviation² = mean (x − mean)²

A source can opt out (`as_given`): its examples then keep their order and its targets their unit. A
source can also divide its examples into phases, which training visits one after the other. Every
split then contains the phases in order.
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

MAX_FILE_BYTES = 1 << 34
"""A data file may have this many bytes; the whole file is read into memory."""


def expand_home(path: Path) -> Path:
    """Replace a leading `~` by the home folder."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise Mistake(f"{quoted(path)}: there is no such home folder") from error


UserPath = Annotated[Path, AfterValidator(expand_home)]
"""A path on the command line or in YAML."""


def quoted(path: Path) -> str:
    """Return `data.path=…` for messages; the quotes show blanks and line breaks in a file name."""
    return f"data.path={str(path)!r}"


def is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:
        raise unreadable(path, error) from error


def require_file(path: Path) -> Path:
    """Return the path of a regular file, or raise with a hint at a similar file name."""
    try:
        is_folder = path.is_dir()
        exists = path.exists()
        entries = path.parent.iterdir() if path.parent.is_dir() and not exists else ()
        siblings = [entry.name for entry in entries if entry.is_file()]
    except OSError as error:
        raise unreadable(path, error) from error
    if is_folder:
        raise Mistake(f"{quoted(path)} is a folder; name the file")
    if not exists:
        hint = one_line(nearest_file(path.name, siblings))
        raise Mistake(f"{quoted(path)}: there is no such file{hint}")
    refuse_special(path, quoted(path), MAX_FILE_BYTES)
    return path


def read_contents(path: Path) -> bytes:
    """Read as many bytes as the file's size; files in /proc have size 0, and some never end."""
    try:
        with require_file(path).open("rb") as file:
            return file.read(path.stat().st_size)
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> Mistake:
    """Return a `Mistake` with the operating system's reason."""
    return Mistake(f"{quoted(path)} cannot be read: {error.strerror}")


def one_line(text: str) -> str:
    """Escape line breaks."""
    return text.replace("\r", "\\r").replace("\n", "\\n")


Standardise = Literal["each", "all", "none"]
"""Standardise each feature separately, all features by common statistics (as for pixels), or none.
"""

# --- Operations on inputs and targets: scaling, filling gaps, noise


def scale_of(how: Standardise, values: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the function that standardises these values to mean 0 and deviation 1.

    A feature that is constant in these values becomes 0 everywhere, because nothing can be learned
    about it.

    >>> measured = scale_of("each", torch.tensor([[1.0, 4.0], [3.0, 4.0]], dtype=torch.float64))
    >>> measured(torch.tensor([[5.0, 6.0]], dtype=torch.float64)).tolist()
    [[3.0, 0.0]]
    """
    if how == "none":
        return torch.clone
    axes = (0,) if how == "each" else tuple(range(values.ndim))
    mean = values.mean(axes, keepdim=True)
    deviation = (values - mean).square().mean(axes, keepdim=True).sqrt()
    # The deviation of equal numbers may round to a nonzero number, so compare their extremes.
    varies = values.amax(axes, keepdim=True) > values.amin(axes, keepdim=True)
    if (varies & ~((deviation > 0) & deviation.isfinite())).any():
        raise Mistake(
            "some numbers are too large or too small for a variance in double precision; change "
            "their unit"
        )
    return lambda x: torch.where(varies, (x - mean) / deviation, 0.0)


def column_means(train: Float[Tensor, "example *shape"]) -> Float[Tensor, " *shape"]:
    """Return the mean of each feature over the examples that have it; NaN marks a missing value.

    >>> column_means(torch.tensor([[1.0, 5.0], [float("nan"), 7.0], [3.0, 9.0]])).tolist()
    [2.0, 7.0]
    """
    mean = train.nanmean(0)
    if mean.isnan().any():
        first = int(mean.isnan().flatten().nonzero()[0]) + 1
        raise Mistake(
            f"data.missing=mean: feature {first} (the target not counted) has no value in any of "
            f"the {len(train)} training rows, so it has no mean; raise data.train, or remove the "
            "column"
        )
    return mean


def add_label_noise(
    target: Int[Tensor, " example"] | Float[Tensor, "example value"],
    classes: int,
    share: float,
    generator: torch.Generator,
) -> Tensor:
    """Add noise to training targets.

    Replace exactly this share of class labels (rounded) by another class, with equal probabilities.
    Add Gaussian noise to real targets, with this share of their standard deviation.

    >>> clean = torch.zeros(10, dtype=torch.int64)
    >>> add_label_noise(clean, 3, 0.2, torch.Generator().manual_seed(0)).count_nonzero().item()
    2
    """
    if not classes:  # y + share · deviation · N(0, 1)
        noise = torch.randn(target.shape, generator=generator, dtype=target.dtype)
        return target + share * target.std(0, correction=0) * noise
    # A cyclic shift by 1 … classes − 1 always changes the class.
    chosen = torch.randperm(len(target), generator=generator)[: round(share * len(target))]
    step = torch.randint(1, max(classes, 2), chosen.shape, generator=generator)
    return target.index_copy(0, chosen, (target[chosen] + step) % classes)


# --- Phases


def share(count: int, number: int, phases: int) -> int:
    """Return the number of examples or steps in phase `number`: equal shares, the first ones
    rounded up.

    >>> [share(128, number, 3) for number in range(3)]
    [43, 43, 42]
    """
    return count // phases + (number < count % phases)


def phase_positions(
    phase: Int[Tensor, " example"] | None, phases: int, count: int
) -> list[Int[Tensor, " chosen"]]:
    """Return the positions of each phase's examples among `count` examples.

    >>> [positions.tolist() for positions in phase_positions(torch.tensor([0, 1, 0]), 2, 3)]
    [[0, 2], [1]]
    >>> [positions.tolist() for positions in phase_positions(None, 1, 3)]
    [[0, 1, 2]]
    """
    if phase is None:
        return [torch.arange(count)]
    return [(phase == number).nonzero()[:, 0] for number in range(phases)]


def find_leak(
    learned: tuple[Float[Tensor, "example *shape"], Int[Tensor, " example"]],
    read: tuple[Float[Tensor, "other *shape"], Int[Tensor, " other"]],
) -> tuple[int, int] | None:
    """Find an example that is learned in one phase and read in another. Return both phases.

    Both arguments are examples and their phases.

    >>> rows, phase = torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1])
    >>> find_leak((rows, phase), (torch.tensor([[2.0]]), torch.tensor([0])))
    (1, 0)
    >>> find_leak((rows, phase), (torch.tensor([[2.0]]), torch.tensor([1])))
    """
    phases_of_row: dict[bytes, set[int]] = {}
    for row, phase in zip(learned[0], learned[1].tolist(), strict=True):
        phases_of_row.setdefault(row.numpy().tobytes(), set()).add(phase)
    for row, phase in zip(read[0], read[1].tolist(), strict=True):
        other_phases = phases_of_row.get(row.numpy().tobytes(), set()) - {phase}
        if other_phases:
            return min(other_phases), phase
    return None


# --- Examples, splits and sources


@dataclass(frozen=True)
class Examples:
    """Inputs before standardisation, and targets: class labels or real values.

    Images may be bytes, where the value `white` stands for 1, because float64 would need eight
    times the memory.
    """

    inputs: Float[Tensor, "example *shape"] | UInt8[Tensor, "example *shape"]
    target: Int[Tensor, " example"] | Float[Tensor, "example value"]
    classes: tuple[str, ...] = ()
    """Names of the classes; empty for regression."""
    white: float = 1.0
    gaps: bool = False
    """NaN marks a missing input, which gets the mean of the training split."""
    vocabulary: int = 0
    """If positive, inputs are tokens, integers below it."""
    one_hot: int = 0
    """If positive, inputs are tokens below it; `part` encodes them as one-hot vectors."""
    as_given: bool = False
    """Keep the order of the examples and the unit of the targets."""
    phases: tuple[str, ...] = ()
    """Names of the training phases; empty without phases."""
    phase: Int[Tensor, " example"] | None = None
    """The phase of each example, in ascending order."""
    phase_classes: tuple[tuple[str, ...], ...] = ()
    """Class names in each phase, if phases share the outputs."""

    def refuse_infinite(self) -> None:
        """Raise if an input or target is not finite; NaN inputs are allowed if they mark gaps."""
        valid = self.inputs.isfinite()
        if self.gaps:
            valid |= self.inputs.isnan()
        for name, bad in (("input", ~valid), ("target", ~self.target.isfinite())):
            if bad.any():
                first = int(bad.nonzero()[0, 0])
                raise Mistake(
                    f"the {name} of example {first} (counting from 0) is not finite; remove or "
                    "repair it"
                )

    def part(self, index: Int[Tensor, " chosen"]) -> Split:
        """Return the examples at these positions in double precision, not yet standardised."""
        inputs = self.inputs[index]
        if self.one_hot:
            inputs = torch.nn.functional.one_hot(inputs.long(), self.one_hot)
        shown = inputs.double() / self.white
        target = self.target[index]
        phase = None if self.phase is None else self.phase[index]
        return Split(shown, shown, target.long() if self.classes else target.double(), index, phase)


@dataclass(frozen=True)
class Split:
    """One part of the data: `shown` before and `inputs` after standardisation."""

    shown: Float[Tensor, "example *shape"]
    inputs: Float[Tensor, "example *shape"]
    target: Int[Tensor, " example"] | Float[Tensor, "example value"]
    index: Int[Tensor, " example"]
    """Positions of the examples in the source."""
    phase: Int[Tensor, " example"] | None = None
    """The phase of each example, in ascending order."""


@dataclass(frozen=True)
class Data:
    """Three disjoint splits."""

    train: Split
    query: Split
    test: Split
    classes: tuple[str, ...]
    vocabulary: int = 0
    phases: tuple[str, ...] = ()
    phase_classes: tuple[tuple[str, ...], ...] = ()


class AbstractSource(Component):
    """A source of examples, and the sizes of the splits; if `test` is None, it gets the rest."""

    train: Count = 128
    query: CountOrNone = 128
    test: CountOrNone | None = None
    seed: int | None = Field(None, ge=0, lt=2**63)
    """None: use the experiment's seed."""
    label_noise: float = Field(0.0, ge=0, lt=1)
    standardise: Standardise = "each"

    @abstractmethod
    def examples(self, generator: torch.Generator) -> Examples:
        """Return all examples, in any order; random numbers come from the generator."""

    def phase_steps(self, steps: int) -> tuple[int, ...]:
        """Return the number of steps in each phase; most sources have one phase."""
        return (steps,)

    @final
    def split(self, seed: int = 0) -> Data:
        """Shuffle the examples, cut the splits, add noise to training targets, and standardise.

        The source's own seed takes precedence over `seed`. The bits do not depend on the number of
        threads, because kernel files identify their data by a digest.
        """
        seed = seed if self.seed is None else self.seed
        with one_thread():
            examples = self.examples(examples_stream(seed))
            examples.refuse_infinite()
            train, *others = (examples.part(index) for index in self.cut(examples, seed))
            if not examples.as_given:
                refuse_leaks(train, others)
                # Check before the noise, which might hide constant targets, and after it.
                refuse_constant(train)
                noise = stream("noise", seed)
                classes = len(examples.classes)
                noisy = add_label_noise(train.target, classes, self.label_noise, noise)
                train = replace(train, target=noisy)
                refuse_constant(train)
            return self.standardised([train, *others], examples)

    @final
    def cut(self, examples: Examples, seed: int) -> tuple[Tensor, ...]:
        """Cut positions into the three splits in random order, with an equal share of each
        phase.
        """
        groups = phase_positions(examples.phase, len(examples.phases), len(examples.inputs))
        phases = len(groups)
        splits: list[tuple[Tensor, ...]] = []
        for number, group in enumerate(groups):
            # Each phase has its own order, which does not depend on the seed of the weights.
            order = group
            if not examples.as_given:
                order = group[torch.randperm(len(group), generator=stream("order", seed))]
            train = share(self.train, number, phases)
            query = share(self.query, number, phases)
            test = None if self.test is None else share(self.test, number, phases)
            # Training examples first, then queries, then test examples.
            end = train + query + (test or 0)
            if end > len(order):
                of_phase = f" of phase {number + 1}" if phases > 1 else ""
                test_key = "" if self.test is None else f", data.test={self.test}"
                raise Mistake(
                    f"data.train={self.train}, data.query={self.query}{test_key} ask for {end} "
                    f"examples{of_phase}, and there are {len(order)}; lower one of them"
                )
            if not train:
                raise Mistake(
                    f"data.train={self.train}: it leaves some of the {phases} phases without an "
                    "example; raise data.train"
                )
            tests = order[train + query :] if test is None else order[train + query : end]
            splits.append((order[:train], order[train : train + query], tests))
        return tuple(torch.cat(parts) for parts in zip(*splits, strict=True))

    @final
    def standardised(self, splits: Sequence[Split], examples: Examples) -> Data:
        """Standardise all splits with the statistics of the first."""
        if examples.gaps:
            fill = column_means(splits[0].shown)
            splits = [
                replace(split, shown=torch.where(split.shown.isnan(), fill, split.shown))
                for split in splits
            ]
        scale = scale_of(self.standardise, splits[0].shown)
        keeps_targets = examples.classes or examples.as_given
        rescale = scale_of("none" if keeps_targets else "each", splits[0].target)
        train, query, test = (
            replace(split, inputs=scale(split.shown), target=rescale(split.target))
            for split in splits
        )
        return Data(
            train=train,
            query=query,
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
    """Compute with one thread, so that sums have a fixed order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def refuse_leaks(train: Split, others: Sequence[Split]) -> None:
    """Raise if an example that is learned in one phase is only read in another."""
    if train.phase is None:
        return
    for split in others:
        assert split.phase is not None
        leak = find_leak((train.shown, train.phase), (split.shown, split.phase))
        if leak is not None:
            learned, read = leak
            raise Mistake(
                f"data.phases: an example that is learned in phase {learned + 1} is read, but not "
                f"learned, in phase {read + 1}; choose phases without common examples, or with the "
                "same ones and the same seed"
            )


def refuse_constant(train: Split) -> None:
    """Raise if all training targets of a phase are equal."""
    phases = 1 if train.phase is None else int(train.phase.max()) + 1
    for number, group in enumerate(phase_positions(train.phase, phases, len(train.target))):
        target = train.target[group]
        if (target == target[:1]).all(0).any():
            of_phase = f" of phase {number + 1}" if phases > 1 else ""
            raise Mistake(
                f"data.train={len(train.target)}: every training example{of_phase} has the same "
                "target, so there is nothing to learn; raise data.train, or try another data.seed, "
                "data.classes or data.target"
            )
