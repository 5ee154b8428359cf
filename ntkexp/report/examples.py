"""Names of examples and outputs for tables and pictures: classes, values,
texts, phases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ntkexp.records.data import OUT_NAME
from ntkexp.report.run import Run
from ntkexp.text import listed, numbered, printable, short, shown_name

MAX_SHOWN_NUMBERS = 8  # number of features that the text of an example lists
PHASE_CLASSES = "phase_classes"


@dataclass(frozen=True)
class Example:
    """A training example or a query, as shown in tables and pictures."""

    index: int  # index in the data source
    name: str  # class name, target values or id
    shown: NDArray[np.generic]  # pixels, tokens or features
    # for an example of a followed loop: its words or first features; otherwise None
    text: str | None = None
    # for a text of a followed loop: the ids or words of its tokens, padded to the
    # longest text with −1 or empty words; otherwise None
    tokens: NDArray[np.generic] | None = None
    # training phase, counted from 1; None if the data have no phases
    phase: int | None = None

    @property
    def label(self) -> str:
        """The name, followed by the phase if there are phases."""
        if self.phase is None:
            return self.name
        return f"{self.name}, phase {self.phase}"


def image_pixels(shown: NDArray[Any]) -> NDArray[Any] | None:
    """Return an image as [height, width] or [height, width, colour];
    None if it is not an image."""
    if shown.ndim == 2:
        return shown
    if shown.ndim == 3 and shown.shape[0] == 1:
        return shown.squeeze(0)
    if shown.ndim == 3 and shown.shape[0] == 3:
        return np.moveaxis(shown, 0, -1)
    return None


def unit_range(pixels: NDArray[Any]) -> NDArray[Any]:
    """Scale pixel values to the range from 0 to 1."""
    low = float(pixels.min())
    high = float(pixels.max())
    return np.asarray((pixels - low) / (high - low or 1.0))


def example(run: Run, split: str, number: int) -> Example:
    """Return one example of a split.

    Examples of a followed loop have an id and a text, but no target.
    """
    shown = run.data[f"{split}_shown"][number]
    if f"{split}_name" in run.data:
        words = (
            str(run.data[f"{split}_text"][number])
            if f"{split}_text" in run.data
            else None
        )
        name = str(run.data[f"{split}_name"][number])
        tokens = run.data.get(f"{split}_tokens", run.data[f"{split}_shown"])[number]
        return named_example(number, name, shown, words, tokens)
    target = run.data[f"{split}_target"][number]
    phase = phase_of(run, split, number)
    if len(run.data["classes"]):
        name = class_name(run, target, phase)
    else:
        name = " ".join(short(float(value)) for value in np.atleast_1d(target))
    return Example(int(run.data[f"{split}_index"][number]), name, shown, phase=phase)


def named_example(
    number: int,
    name: str,
    shown: NDArray[np.generic],
    words: str | None,
    tokens: NDArray[np.generic] | None = None,
) -> Example:
    """Return an example of a followed loop. Its text is `words`.

    Without `words`, the text lists the first features. It is empty for an image.
    """
    if words is not None:
        text = " ".join(map(printable, words.split()))
    elif shown.ndim == 1:
        text = " ".join(short(float(value)) for value in shown[:MAX_SHOWN_NUMBERS])
        text += " …" if text and len(shown) > MAX_SHOWN_NUMBERS else ""
    else:
        text = ""
    return Example(number, shown_name(numbered(number, name)), shown, text, tokens)


def example_on_axis(run: Run, axis: str, place: int) -> Example:
    """Return the training example or query at an index along an axis
    of the contributions."""
    if axis == "example":
        return example(run, "train", place)
    split = next(split for split, points in run.points.items() if place < points.stop)
    return example(run, split, place - run.points[split].start)


def example_names(run: Run) -> list[str]:
    """Return the ids of the training examples,
    or their positions if they have no ids."""
    if has_names(run):
        return [str(name) for name in run.contributions.coords["example"].to_numpy()]
    return list(map(str, range(len(run.data["train_index"]))))


def has_names(run: Run) -> bool:
    """Return True if each training example has its own id, as in followed loops."""
    names = run.contributions.coords["example"].to_numpy()
    return names.dtype.kind not in "iu" and len(set(names)) == len(names)


# --- Classes, phases and outputs. If phases share outputs, output k belongs to the k-th
# class of each phase.


def phase_of(run: Run, split: str, number: int) -> int | None:
    """Return the phase of an example, counted from 1. Return None
    if the data have no phases."""
    phases = run.data.get(f"{split}_phase")
    if phases is None:
        return None
    return int(phases[number])


def class_name(run: Run, target: int, phase: int | None) -> str:
    """Return the name of class `target`. If phases share outputs,
    the name depends on the phase."""
    names = run.data["classes"]
    if phase is not None and PHASE_CLASSES in run.data:
        names = run.data[PHASE_CLASSES][phase - 1]
    return shown_name(str(names[target]))


def predicted_class(run: Run, outputs: NDArray[Any], phase: int | None) -> str:
    """Return the class that the network predicts: the class of the largest output.

    If there is a single output for two classes, a positive output means the second
    class. Return "" if there are no classes, or if the run attributes a measure."""
    if not len(run.data["classes"]) or OUT_NAME in run.data:
        return ""
    if len(outputs) == 1:
        return class_name(run, int(outputs[0] > 0), phase)
    return class_name(run, int(outputs.argmax()), phase)


def output_name(run: Run, out: int, outputs: int, phase: int | None = None) -> str:
    """Return the name of an output.

    If the run attributes a measure, the measure names the output. A single output is
    "f". If there is an output for each class, it is "f for <class>", else "f[out]"."""
    if OUT_NAME in run.data:
        return str(run.data[OUT_NAME][out])
    if outputs == 1:
        return "f"
    if outputs == len(run.data["classes"]):
        return f"f for {class_name(run, out, phase)}"
    return f"f[{out}]"


def sharing(run: Run, out: int, outputs: int) -> str:
    """Name the classes that share output number `out`.

    If phases share outputs, name a class in each phase. If a single output separates
    two classes, name both. Otherwise return "".
    """
    if PHASE_CLASSES not in run.data:
        if outputs > 1 or len(run.data["classes"]) != 2 or OUT_NAME in run.data:
            return ""
        below, above = (class_name(run, target, None) for target in (0, 1))
        return f"above 0, f is for {above}; below, for {below}"
    classes_by_output = [
        listed(
            [
                f"{shown_name(name)} in phase {number}"
                for number, name in enumerate(names, start=1)
            ]
        )
        for names in run.data[PHASE_CLASSES].T.tolist()
    ]
    if outputs > 1:
        return f"this output is for {classes_by_output[out]}"
    return (
        f"above 0, f is for {classes_by_output[1]}; below, for {classes_by_output[0]}"
    )
