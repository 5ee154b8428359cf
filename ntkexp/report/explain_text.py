"""Explanations as a reader sees them: lines on a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ntkexp.report.examples import Example
from ntkexp.report.explain import Explanation, Part
from ntkexp.text import MISSING, aligned, counted, percent, short

LONGEST = 60  # letters of an example's text


def told(explanation: Explanation, top: int) -> str:
    """Tell one point: what its prediction is made of, and a line for each example that made most of it."""
    head = (
        f"{explanation.split} {explanation.number} (#{explanation.point.index}, {explanation.point.label}): "
        f"{explanation.output} = {short(explanation.prediction)}"
    )
    made = aligned(
        ("made of", ""), [(name, signed(value)) for name, value in explanation.pieces.items()], (False, True)
    )
    return "\n\n".join([head, made, examples(explanation, top), *notes(explanation)])


def notes(explanation: Explanation) -> list[str]:
    """Say what the output is for and when it moved, and what columns mean that might be taken for one another."""
    when = "" if explanation.movement is None else explanation.movement.sentence
    return [said for said in (explanation.sharing, when, columns(explanation), sketched(explanation)) if said]


def sketched(explanation: Explanation) -> str:
    """Say what no sketch tells."""
    if explanation.sketch is None:
        return ""
    return (
        f"added, by sketches (kernel.sketch={explanation.sketch}): only the sum is exact, no part and no order of parts"
    )


def columns(explanation: Explanation) -> str:
    """Say what two columns mean, if there are two."""
    if explanation.warning:
        return f"if left out: withheld; {explanation.warning}"
    if all(part.left_out is None for part in explanation.parts):
        return ""
    how = "found by training without it" if explanation.left_out_is_actual else "predicted by its effect"
    return f"added: on the way, in this training; if left out: how much the output would change without it, {how}"


def examples(explanation: Explanation, top: int) -> str:
    """Tabulate the examples that added or took most, and all others in one line."""
    parts, rest = explanation.parts[:top], explanation.parts[top:]
    mass = explanation.mass or 1.0
    says = any(part.example.text for part in parts)
    tells = any(part.left_out is not None for part in explanation.parts)
    phased = explanation.point.phase is not None
    rows = [
        (
            called(part.example),
            fitting(part.example.text or "") if says else part.example.name,
            *([str(part.example.phase)] if phased else []),
            signed(part.added),
            percent(abs(part.added) / mass),
            when(part),
            *([without(part)] if tells else []),
        )
        for part in parts
    ]
    if rest:
        shares = sum(abs(part.added) for part in rest) / mass
        others = counted(len(rest), "other")
        rows.append((others, *[""] * (1 + phased), signed(sum(part.added for part in rest)), percent(shares), MISSING))
        rows[-1] = (*rows[-1], *([MISSING] if tells else []))
    known = ["if left out"] if tells else []
    named = "target" if parts and parts[0].example.text is None else "name"
    phase = ["phase"] if phased else []
    header = ("example", "holds" if says else named, *phase, "added", "of all parts", "half by", *known)
    return aligned(header, rows, (False, False, *[True] * (len(header) - 2)))


def without(part: Part) -> str:
    """Spell by how much the output would change without an example: it adds up to nothing with others."""
    return MISSING if part.left_out is None else signed(part.left_out)


def called(example: Example) -> str:
    """Name an example by its number in the source, or by its own name where it says something itself."""
    return example.name if example.text else f"#{example.index}"


def fitting(text: str) -> str:
    """Shorten a text so that it stays on its line.

    >>> fitting("one\\ntwo")
    'one two'
    """
    words = " ".join(text.split())
    return words if len(words) <= LONGEST else f"{words[: LONGEST - 1]}…"


def when(part: Part) -> str:
    """Spell the share of the path by which half of a contribution was made."""
    return percent(part.halfway) if math.isfinite(part.halfway) else MISSING


def signed(value: float) -> str:
    """Spell a number with its sign.

    >>> signed(0.5), signed(-0.25), signed(0.0)
    ('+0.5', '-0.25', '0')
    """
    return f"+{short(value)}" if value > 0 else short(value + 0.0)


def all_told(explanations: Sequence[Explanation], top: int) -> str:
    """Tell several points."""
    return "\n\n".join(told(explanation, top) for explanation in explanations) + "\n"
