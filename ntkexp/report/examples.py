"""Training examples in names for readers: which a request means, when they are learned, when they acted, when outputs
moved.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ntkexp.mistake import WrongArgument, nearest
from ntkexp.records.contributions import BY_STEP, HALF_BY, LAST_STEP
from ntkexp.records.data import OUT_NAME
from ntkexp.records.results import RETRACED
from ntkexp.report.run import Run
from ntkexp.text import listed, percent, printable, short, shown_name

FEW = 8  # numbers of a row that are shown
PHASE_CLASSES = "phase_classes"


@dataclass(frozen=True)
class Example:
    """An example of the data has a number in the source, is of a class or has values, and looks like this; `text` is
    what it says, where it has no target, and `phase`, counted from 1, when it was learned, where there are phases.
    """

    index: int
    name: str
    shown: NDArray[np.generic]
    text: str | None = None
    phase: int | None = None

    @property
    def label(self) -> str:
        """It goes by its name, and by its phase, if it has one."""
        return self.name if self.phase is None else f"{self.name}, phase {self.phase}"


def image_pixels(shown: NDArray[Any]) -> NDArray[Any] | None:
    """Return [height, width] or [height, width, colour]; None if the example is no image."""
    if shown.ndim == 2:
        return shown
    if shown.ndim == 3 and shown.shape[0] in (1, 3):
        return shown[0] if shown.shape[0] == 1 else np.moveaxis(shown, 0, -1)
    return None


def output_name(run: Run, out: int, outputs: int, phase: int | None = None) -> str:
    """Name the output that is explained: as a measure does, f, that of a class in its phase, or by its place."""
    if OUT_NAME in run.data:
        return str(run.data[OUT_NAME][out])
    classes = run.data["classes"]
    if not 1 < outputs == len(classes):
        return f"f[{out}]" if outputs > 1 else "f"
    return f"f for {class_name(run, out, phase)}"


def sharing(run: Run, out: int, outputs: int) -> str:
    """Say what an output is for in each phase, where phases share the outputs."""
    if PHASE_CLASSES not in run.data:
        return ""
    here = [
        listed(
            [f"{shown_name(name)} in phase {number}" for number, name in enumerate(names, start=1)]
        )
        for names in run.data[PHASE_CLASSES].T.tolist()
    ]
    return (
        f"this output is for {here[out]}"
        if outputs > 1
        else f"above 0, f is for {here[1]}; below, for {here[0]}"
    )


def phase_of(run: Run, split: str, number: int) -> int | None:
    """Find the phase that an example of a split is of, counted from 1, where there are phases."""
    phases = run.data.get(f"{split}_phase")
    return None if phases is None else int(phases[number])


def class_name(run: Run, target: int, phase: int | None) -> str:
    """Name a class as its phase does, where phases share the outputs."""
    shared = run.data.get(PHASE_CLASSES)
    name = (
        run.data["classes"][target]
        if phase is None or shared is None
        else shared[phase - 1, target]
    )
    return shown_name(str(name))


def example(run: Run, split: str, number: int) -> Example:
    """Read one example of a split; one of a loop that was followed has a name, and its text or numbers for a target."""
    shown = run.data[f"{split}_shown"][number]
    if f"{split}_name" in run.data:
        words = str(run.data[f"{split}_text"][number]) if f"{split}_text" in run.data else None
        return named_example(number, str(run.data[f"{split}_name"][number]), shown, words)
    target, phase = run.data[f"{split}_target"][number], phase_of(run, split, number)
    values = " ".join(short(float(value)) for value in np.atleast_1d(target))
    name = class_name(run, target, phase) if len(run.data["classes"]) else values
    return Example(int(run.data[f"{split}_index"][number]), name, shown, phase=phase)


def named_example(number: int, name: str, shown: NDArray[np.generic], words: str | None) -> Example:
    """An example of a loop that was followed, by its name, with its words if it has some, or its first numbers."""
    if words is not None:
        return Example(number, shown_name(name), shown, " ".join(map(printable, words.split())))
    some = " ".join(short(float(value)) for value in shown[:FEW]) if shown.ndim == 1 else ""
    return Example(
        number, shown_name(name), shown, f"{some} …" if some and len(shown) > FEW else some
    )


def example_on_axis(run: Run, axis: str, place: int) -> Example:
    """The training example or the point at a place along an axis of contributions."""
    if axis == "example":
        return example(run, "train", place)
    split = next(split for split, points in run.points.items() if place < points.stop)
    return example(run, split, place - run.points[split].start)


# --- Which training examples a request means: by place, number in the source, name, class or influence.
#
#     3        the example at this place among the training examples
#     20..29   all from one place to another
#     #17      the one with this number in the source, as tables show it
#     class:3  all of a class, by its name
#     3f9a…    the one of this name (an id, or the beginning of a digest)
#     top:10   those of most influence
#
# Where examples of a loop were given numbers for ids, numbers are these, and not places.


SHORTEST = 6  # of the beginning of a digest
FORMS = "give places such as 3,20..29, #17 for a number in the source, an id, class:NAME or top:N"


def choose_group(run: Run, text: str, influence: Callable[[], NDArray[np.float64]]) -> list[int]:
    """The places of the examples that are meant; `influence` is asked for where it decides."""
    count = len(run.data["train_index"])
    chosen: set[int] = set()
    for word in filter(None, (part.strip() for part in text.split(","))):
        chosen |= set(find_points(run, word, count, influence))
    if not chosen:
        raise WrongArgument(f"without={text}: it names no training example; {FORMS}", "without")
    if len(chosen) == count:
        raise WrongArgument(
            f"without={text}: these are all {count} training examples; leave some of them",
            "without",
        )
    return sorted(chosen)


def find_points(
    run: Run, word: str, count: int, influence: Callable[[], NDArray[np.float64]]
) -> Sequence[int]:
    kind, _, rest = word.partition(":")
    if kind == "class" and rest:
        classes = [str(each) for each in run.data["classes"]]
        if not classes:
            raise WrongArgument(
                f"without={word}: the targets of {run.name} are no classes", "without"
            )
        if rest not in classes:
            near = nearest(rest, classes) or f"; there are {', '.join(classes[:12])}"
            raise WrongArgument(f"without={word}: there is no such class{near}", "without")
        return [int(k) for k in np.flatnonzero(run.data["train_target"] == classes.index(rest))]
    if kind == "top" and rest:
        if not rest.isdigit() or not 0 < int(rest) <= count:
            raise WrongArgument(f"without={word}: top takes a number from 1 to {count}", "without")
        return [int(k) for k in np.argsort(-influence(), kind="stable")[: int(rest)]]
    if numbers := re.fullmatch(r"(\d+)(?:\.\.(\d+))?", word):
        return find_numbers(run, word, int(numbers[1]), int(numbers[2] or numbers[1]), count)
    return find_name(run, word)


def find_numbers(run: Run, word: str, first: int, last: int, count: int) -> Sequence[int]:
    """The examples from the first to the last: by ids, where these are numbers, else by places."""
    if last < first:
        raise WrongArgument(
            f"without={word}: it counts downwards; write {last}..{first}", "without"
        )
    if has_names(run):
        names = example_names(run)
        if all(name.isdecimal() for name in names):
            if matches := [k for k, name in enumerate(names) if first <= int(name) <= last]:
                return matches
            raise WrongArgument(
                f"without={word}: no training example has this id, and ids here are numbers",
                "without",
            )
        if matches := [
            k for k, name in enumerate(names) if name == word
        ]:  # a digest may have no letters
            return matches
    if last >= count:
        text = f"without={word}: the training examples have places 0 to {count - 1}"
        raise WrongArgument(f"{text}; write #{last} if you mean a number in the source", "without")
    return range(first, last + 1)


def find_name(run: Run, word: str) -> list[int]:
    """The example of a name, or of a name that begins so; #17: of a number in the source."""
    names = example_names(run)
    if re.fullmatch(r"#\d+", word):
        matches = [k for k, name in enumerate(names) if name == word[1:]]
        matches = matches or np.flatnonzero(run.data["train_index"] == int(word[1:])).tolist()
        if not matches:
            raise WrongArgument(
                f"without={word}: no training example has this number in the source", "without"
            )
        return list(map(int, matches))
    matches = [k for k, name in enumerate(names) if name == word]
    matches = matches or [
        k for k, name in enumerate(names) if len(word) >= SHORTEST and name.startswith(word)
    ]
    if not matches:
        raise WrongArgument(
            f"without={word}: no training example is called that; {FORMS}", "without"
        )
    if len({names[k] for k in matches}) > 1:
        raise WrongArgument(
            f"without={word}: the names of {len(matches)} examples begin so; write more of it",
            "without",
        )
    return matches


def example_names(run: Run) -> list[str]:
    """Name the training examples as the contributions do, or else by their places."""
    if has_names(run):
        return [str(name) for name in run.contributions.coords["example"].to_numpy()]
    return list(map(str, range(len(run.data["train_index"]))))


def has_names(run: Run) -> bool:
    """Whether each training example has a name of its own; numbers in the source are asked for otherwise."""
    names = run.contributions.coords["example"].to_numpy()
    return names.dtype.kind not in "iu" and len(set(names)) == len(names)


# --- When in training an example acted on a point: the path time by which half of what it added had been added.
#
#     m_i(t) = |Σ_c K_t(x, xᵢ)_c ℓ′ᵢ(t)_c|,    half: ∫₀ʰ m_i = ½ ∫₀ᵀ m_i
#
# from the tangent kernels that were kept, by the trapezoidal rule between them; where there are phases, over the
# example's own, at whose ends kernels are kept. What an optimizer with memory makes of a gradient no kernel of a
# moment tells: there the second pass has seen it (`path.backward`), or nothing is said.


def halfway(run: Run, rule: str, point: int, out: int) -> NDArray[np.float64]:
    """The share of the path time for each training example; NaN where it did nothing, or nothing was kept."""
    if (seen := run.by_rule(HALF_BY, rule)) is not None:
        return seen.isel(probe=point).sel(out=out).to_numpy().astype(float)
    fractions = np.full(run.kernels.sizes["train"], np.nan)
    gradients = run.kernels.get("output_gradient")
    unseen = (
        (run.path / RETRACED).is_file() or "tangent" not in run.kernels or "time" not in run.metrics
    )
    if unseen or gradients is None or gradients.sizes["snapshot"] < 2:
        return fractions
    # m_i at the steps of the kernels that were kept, [step, example]
    steps = run.kernels["step"].to_numpy()
    times = run.metrics.set_index("step")["time"].reindex(steps).to_numpy(dtype=float)
    kernel = run.kernels["tangent"].isel(probe=point, out=out).to_numpy()
    mass = np.abs(np.einsum("sic,sic->si", kernel, gradients.to_numpy()))
    for i in range(len(fractions)):
        own = slice(
            None
        )  # where there are phases, from where the example is learned to where that ends
        if "train_phase" in run.data:
            learned = run.metrics["step"][run.metrics["phase"] == run.data["train_phase"][i]]
            if learned.empty:
                continue
            own = slice(*np.searchsorted(steps, [learned.iloc[0], learned.iloc[-1] + 2]).tolist())
        if len(there := times[own]) and times[-1] > times[0]:
            middle = there[0] - times[0] + half(there, mass[own, i]) * (there[-1] - there[0])
            fractions[i] = middle / (times[-1] - times[0])
    return fractions


def half(times: NDArray[np.float64], mass: NDArray[np.float64]) -> float:
    """Find where half of an integral lies, as a share of its range.

    >>> half(np.array([0.0, 1.0, 2.0]), np.array([1.0, 1.0, 1.0]))
    0.5
    """
    gathered = np.concatenate([[0.0], np.cumsum(np.diff(times) * (mass[1:] + mass[:-1]) / 2)])
    if not np.isfinite(gathered).all() or gathered[-1] <= 0 or times[-1] <= times[0]:
        return float("nan")
    return float((np.interp(gathered[-1] / 2, gathered, times) - times[0]) / (times[-1] - times[0]))


# --- When training moved an output: what came of each step, or of each stretch of steps, and by when most of it was
# there.
#
#     d(s) = f_s − f_0,      most by the first s with |d(t) − d(T)| ≤ ½ |d(T)| for all t ≥ s
#
# What an optimizer remembers of a gradient counts where the gradient was taken.


@dataclass(frozen=True, eq=False)
class Movement:
    """An output at a point moved by so much in each stretch of steps, up to its last step."""

    by_step: NDArray[np.float64]
    last_step: NDArray[np.int64]

    @property
    def steps(self) -> int:
        return int(self.last_step[-1]) + 1

    @property
    def most_by(self) -> int | None:
        """The number of steps after which most of the change was there, and stayed; None where nothing has changed.

        >>> Movement(np.array([1.0, -3.0, 4.0, 0.5]), np.arange(4)).most_by
        3
        """
        so_far = np.cumsum(self.by_step)
        if not so_far[-1]:
            return None
        away = np.flatnonzero(np.abs(so_far - so_far[-1]) > abs(so_far[-1]) / 2)
        return int(self.last_step[away[-1] + 1 if len(away) else 0]) + 1

    @property
    def sentence(self) -> str:
        """Say when most of the change came.

        >>> Movement(np.array([3.0, 1.0, 0.5, 0.5]), np.arange(4)).sentence
        'most of what training changed here came in the first 25 % of its steps (1 of 4)'
        """
        if (most := self.most_by) is None:
            return ""
        return (
            f"most of what training changed here came in the first {percent(most / self.steps)} of its steps "
            f"({most} of {self.steps})"
        )


def movement(run: Run, rule: str, point: int, out: int) -> Movement | None:
    """Find how an output moved, if that is known."""
    by_step = run.by_rule(BY_STEP, rule)
    if by_step is None or not by_step.sizes["step"]:
        return None
    moved = by_step.isel(probe=point).sel(out=out).to_numpy().astype(float)
    return (
        Movement(moved, run.contributions[LAST_STEP].to_numpy())
        if np.isfinite(moved).all()
        else None
    )
