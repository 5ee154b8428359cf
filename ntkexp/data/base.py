"""Sources of examples, and the splits into training examples,
queries and test examples.

A source returns examples, and `split` cuts three disjoint splits from them: `train`,
`query` and `test`. The seed determines the random examples, their order and the noise,
by separate random streams. Inputs and real targets are standardised with the statistics
of the training split:

    x ← (x − mean) / deviation,    deviation² = mean (x − mean)²

With `as_given`, examples keep their order, and targets keep their unit. A source can
also divide its examples into phases, which are trained one after another. Every split
then contains the phases in order."""

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
"""Largest size of a data file in bytes. The whole file is read into memory."""


def expand_home(path: Path) -> Path:
    """Replace a leading `~` by the home folder."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise Mistake(f"{quoted(path)}: there is no such home folder") from error


UserPath = Annotated[Path, AfterValidator(expand_home)]
"""A path from the command line or a YAML file."""


def quoted(path: Path) -> str:
    """Return `data.path='…'` for messages. The quotes make blanks
    and line breaks visible."""
    return f"data.path={str(path)!r}"


def is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:
        raise unreadable(path, error) from error


def require_file(path: Path) -> Path:
    """Return the path if it is a regular file. Otherwise raise, with a hint at a file
    with a similar name."""
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
    """Return the contents of a file. Read no more bytes than its size, because some
    special files never end."""
    try:
        with require_file(path).open("rb") as file:
            return file.read(path.stat().st_size)
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> Mistake:
    """Return a `Mistake` with the reason that the operating system gives."""
    return Mistake(f"{quoted(path)} cannot be read: {error.strerror}")


def one_line(text: str) -> str:
    """Escape line breaks."""
    return text.replace("\r", "\\r").replace("\n", "\\n")


Standardise = Literal["each", "all", "none"]
"""Standardise each feature separately, all features with common statistics (for
pixels), or nothing."""

# --- Operations on inputs and targets: scaling, filling gaps, noise


def scale_of(mode: Standardise, values: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the affine map that standardises these values to mean 0
    and standard deviation 1.

    A feature that is constant in these values is mapped to 0 everywhere, because a
    network cannot learn from it.

    >>> scale = scale_of("each", torch.tensor([[1.0, 4.0], [3.0, 4.0]], dtype=torch.float64))
    >>> scale(torch.tensor([[5.0, 6.0]], dtype=torch.float64)).tolist()
    [[3.0, 0.0]]
    """
    if mode == "none":
        return torch.clone
    axes = (0,) if mode == "each" else tuple(range(values.ndim))
    mean = values.mean(axes, keepdim=True)
    deviation = (values - mean).square().mean(axes, keepdim=True).sqrt()
    # Compare extremes, because rounding can give equal numbers a nonzero deviation.
    varies = values.amax(axes, keepdim=True) > values.amin(axes, keepdim=True)
    if (varies & ~((deviation > 0) & deviation.isfinite())).any():
        raise Mistake(
            "some numbers are too large or too small for a variance in double precision; change "
            "their unit"
        )
    return lambda x: torch.where(varies, (x - mean) / deviation, 0.0)


def column_means(train: Float[Tensor, " example *shape"]) -> Float[Tensor, " *shape"]:
    """Return the mean of each feature, ignoring NaN. Raise if a feature has only NaN.

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

    For class labels, replace the given share of the labels (rounded to a whole number
    of labels) by other classes, with equal probabilities. For real targets, add
    Gaussian noise. Its standard deviation is `share` times the standard deviation of
    the targets.

    >>> clean = torch.zeros(10, dtype=torch.int64)
    >>> add_label_noise(clean, 3, 0.2, torch.Generator().manual_seed(0)).count_nonzero().item()
    2
    """
    if not classes:  # y + share · deviation · N(0, 1)
        noise = torch.randn(target.shape, generator=generator, dtype=target.dtype)
        return target + share * target.std(0, correction=0) * noise
    # A cyclic shift by 1 … classes − 1 always changes the class.
    chosen = torch.randperm(len(target), generator=generator)[
        : round(share * len(target))
    ]
    step = torch.randint(1, max(classes, 2), chosen.shape, generator=generator)
    return target.index_copy(0, chosen, (target[chosen] + step) % classes)


# --- Phases


def share(count: int, number: int, phases: int) -> int:
    """Divide `count` examples or steps equally among `phases` phases, and return the
    share of phase `number`. If there is a remainder, the first phases get one more.

    >>> [share(128, number, 3) for number in range(3)]
    [43, 43, 42]
    """
    return count // phases + (number < count % phases)


def phase_positions(
    phase: Int[Tensor, " example"] | None, phases: int, count: int
) -> list[Int[Tensor, " chosen"]]:
    """Return, for each phase, the indices of its examples. There are `count` examples.

    >>> [positions.tolist() for positions in phase_positions(torch.tensor([0, 1, 0]), 2, 3)]
    [[0, 2], [1]]
    >>> [positions.tolist() for positions in phase_positions(None, 1, 3)]
    [[0, 1, 2]]
    """
    if phase is None:
        return [torch.arange(count)]
    return [(phase == number).nonzero()[:, 0] for number in range(phases)]


def find_leak(
    train: tuple[Float[Tensor, " example *shape"], Int[Tensor, " example"]],
    evaluated: tuple[Float[Tensor, " other *shape"], Int[Tensor, " other"]],
) -> tuple[int, int] | None:
    """Find a training example of one phase that is evaluated in another phase. Return
    both phases, or None if there is no such example.

    `train` and `evaluated` contain examples and their phases.

    >>> rows, phase = torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1])
    >>> find_leak((rows, phase), (torch.tensor([[2.0]]), torch.tensor([0])))
    (1, 0)
    >>> find_leak((rows, phase), (torch.tensor([[2.0]]), torch.tensor([1])))
    """
    phases_of_row: dict[bytes, set[int]] = {}
    for row, phase in zip(train[0], train[1].tolist(), strict=True):
        phases_of_row.setdefault(row.numpy().tobytes(), set()).add(phase)
    for row, phase in zip(evaluated[0], evaluated[1].tolist(), strict=True):
        other_phases = phases_of_row.get(row.numpy().tobytes(), set()) - {phase}
        if other_phases:
            return min(other_phases), phase
    return None


# --- Examples, splits and sources


@dataclass(frozen=True)
class Examples:
    """Inputs before standardisation, and targets,
    which are class labels or real values.

    Images may be stored as bytes, to save memory. `white` is the byte for intensity 1.
    """

    inputs: Float[Tensor, " example *shape"] | UInt8[Tensor, " example *shape"]
    target: Int[Tensor, " example"] | Float[Tensor, "example value"]
    classes: tuple[str, ...] = ()
    """Names of the classes; empty for regression."""
    white: float = 1.0
    gaps: bool = False
    """If True, NaN marks a missing input. It is replaced by the mean
    over the training split."""
    vocabulary: int = 0
    """If positive, inputs are tokens: integers below this number."""
    one_hot: int = 0
    """If positive, inputs are tokens below this number,
    which `part` encodes as one-hot vectors."""
    as_given: bool = False
    """If True, examples keep their order, and targets their unit. No noise is added."""
    phases: tuple[str, ...] = ()
    """Names of the phases. Empty for data without phases."""
    phase: Int[Tensor, " example"] | None = None
    """The number of the phase of each example. Examples are sorted by this number."""
    phase_classes: tuple[tuple[str, ...], ...] = ()
    """Class names in each phase, if phases share the outputs."""

    def refuse_infinite(self) -> None:
        """Raise if an input or target is not finite. NaN
        inputs are allowed if they mark gaps."""
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

    def refuse_unfit_targets(self) -> None:
        """Raise unless each input has a target, and each label a class."""
        if len(self.inputs) != len(self.target):
            raise Mistake(
                f"the data has {len(self.inputs)} inputs and {len(self.target)} targets; give one "
                "target for each input"
            )
        count = len(self.classes)
        bad = (self.target < 0) | (self.target >= count)
        if count and bad.any():
            first = int(bad.nonzero()[0, 0])
            raise Mistake(
                f"the target of example {first} (counting from 0) is {self.target[first].item()}, "
                f"and there are {count} classes; give labels from 0 to {count - 1}"
            )

    def equals(self, other: Examples) -> bool:
        """Return True if the inputs and the targets are equal."""
        return torch.equal(
            self.inputs.nan_to_num(), other.inputs.nan_to_num()
        ) and torch.equal(self.target, other.target)

    def part(self, index: Int[Tensor, " chosen"]) -> Split:
        """Return the examples at these indices in double precision,
        not yet standardised."""
        inputs = self.inputs[index]
        if self.one_hot:
            inputs = torch.nn.functional.one_hot(inputs.long(), self.one_hot)
        shown = inputs.double() / self.white
        target = self.target[index]
        phase = None if self.phase is None else self.phase[index]
        return Split(
            shown,
            shown,
            target.long() if self.classes else target.double(),
            index,
            phase,
        )


@dataclass(frozen=True)
class Split:
    """One split of the data. `shown` are the inputs before standardisation, and
    `inputs` are the standardised inputs."""

    shown: Float[Tensor, " example *shape"]
    inputs: Float[Tensor, " example *shape"]
    target: Int[Tensor, " example"] | Float[Tensor, "example value"]
    index: Int[Tensor, " example"]
    """Indices of the examples in the source."""
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
    """A source of examples, and the sizes of the splits. If the size `test` is None,
    the test split contains all other examples."""

    train: Count = 128
    query: CountOrNone = 128
    test: CountOrNone | None = None
    seed: int | None = Field(None, ge=0, lt=2**63)
    """If None, use the seed of the experiment."""
    label_noise: float = Field(0.0, ge=0, lt=1)
    standardise: Standardise = "each"

    @abstractmethod
    def examples(self, generator: torch.Generator) -> Examples:
        """Return all examples in any order. Draw random numbers from the generator."""

    def phase_steps(self, steps: int) -> tuple[int, ...]:
        """Return the number of training steps in each phase.
        By default there is one phase."""
        return (steps,)

    @final
    def split(self, seed: int = 0) -> Data:
        """Shuffle the examples, cut the splits, add noise to training targets,
        and standardise.

        A seed of the source has precedence over `seed`. Kernel files identify data by a
        digest, so the result must not depend on the number of threads, not even in the
        last bit."""
        seed = seed if self.seed is None else self.seed
        with one_thread():
            examples = self.examples(examples_stream(seed))
            examples.refuse_infinite()
            examples.refuse_unfit_targets()
            self.refuse_irreproducible(examples, seed)
            train, *others = (
                examples.part(index) for index in self.split_indices(examples, seed)
            )
            if not examples.as_given:
                refuse_leaks(train, others)
                # Check before and after the noise,
                # because noise could hide constant targets.
                refuse_constant(train)
                noise = stream("noise", seed)
                classes = len(examples.classes)
                noisy = add_label_noise(train.target, classes, self.label_noise, noise)
                train = replace(train, target=noisy)
                refuse_constant(train)
            return self.standardised([train, *others], examples)

    @final
    def refuse_irreproducible(self, examples: Examples, seed: int) -> None:
        """Raise if a source from outside this package draws different examples from the
        same seed. A resumed run would then continue with different data."""
        if type(self).__module__.split(".")[0] == "ntkexp":
            return
        if not examples.equals(self.examples(examples_stream(seed))):
            raise Mistake(
                f"data={self.option}: examples() returns other examples when it is called again "
                "with the same seed; draw random numbers from the argument generator"
            )

    @final
    def split_indices(self, examples: Examples, seed: int) -> tuple[Tensor, ...]:
        """Return the indices of the three splits. Their order is random, unless the
        examples are `as_given`. Every phase gets an equal part of each split."""
        groups = phase_positions(
            examples.phase, len(examples.phases), len(examples.inputs)
        )
        phases = len(groups)
        splits: list[tuple[Tensor, ...]] = []
        for number, group in enumerate(groups):
            order = group
            if not examples.as_given:
                # a new generator, so that no phase affects the order of another one
                generator = stream("order", seed)
                order = group[torch.randperm(len(group), generator=generator)]
            train = share(self.train, number, phases)
            query = share(self.query, number, phases)
            test = None if self.test is None else share(self.test, number, phases)
            # Cut training examples, then queries, then test examples.
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
            rest = order[train + query :]
            splits.append((order[:train], order[train : train + query], rest[:test]))
        return tuple(torch.cat(parts) for parts in zip(*splits, strict=True))

    @final
    def standardised(self, splits: Sequence[Split], examples: Examples) -> Data:
        """Standardise all splits with the statistics of the training split."""
        if examples.gaps:
            fill = column_means(splits[0].shown)
            splits = [
                replace(
                    split, shown=torch.where(split.shown.isnan(), fill, split.shown)
                )
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
    """Limit torch to one thread in this context, so that sums have a fixed order."""
    previous = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def refuse_leaks(train: Split, other_splits: Sequence[Split]) -> None:
    """Raise if a training example of one phase is evaluated in another phase."""
    if train.phase is None:
        return
    for split in other_splits:
        assert split.phase is not None
        leak = find_leak((train.shown, train.phase), (split.shown, split.phase))
        if leak is not None:
            train_phase, evaluated_phase = leak
            raise Mistake(
                f"data.phases: a training example of phase {train_phase + 1} is a query or test "
                f"example of phase {evaluated_phase + 1}; choose phases without common examples, "
                "or with equal examples and an equal seed"
            )


def refuse_constant(train: Split) -> None:
    """Raise if all training targets of a phase are equal in one output."""
    phases = 1 if train.phase is None else int(train.phase.max()) + 1
    for number, group in enumerate(
        phase_positions(train.phase, phases, len(train.target))
    ):
        target = train.target[group]
        if (target == target[:1]).all(0).any():
            of_phase = f" of phase {number + 1}" if phases > 1 else ""
            raise Mistake(
                f"data.train={len(train.target)}: every training example{of_phase} has the same "
                "target, so there is nothing to learn; raise data.train, or try another data.seed, "
                "data.classes or data.target"
            )
