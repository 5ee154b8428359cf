"""Who caused the forgetting, as a reader sees it: a sentence for every pair of phases, and the worst examples."""

from __future__ import annotations

from collections.abc import Callable

from ntkexp.report.examples import example
from ntkexp.report.explain_text import signed
from ntkexp.report.forgetting import Forgetting, forgettings
from ntkexp.report.run import Run
from ntkexp.text import aligned, counted, percent, short


def told_of_tasks(run: Run, top: int) -> str:
    """Tell what phases did to earlier tasks, and by which examples most was lost; nothing, if there are no phases."""
    found = forgettings(run)
    if not found:
        return ""
    worst = min(found, key=lambda each: each.change)
    return "\n\n".join([*map(sentence, found), *([table(run, worst, top)] if worst.worst else [])]) + "\n"


def sentence(found: Forgetting) -> str:
    """Say what happened, and who did it."""
    what, before, after = (
        ("margin", found.before, found.after) if found.right else ("loss", -found.before, -found.after)
    )
    task, phase = f"{found.names[0]} (task {found.task})", f"{found.names[1]} was learned (phase {found.during})"
    at = f"at {found.points} {found.split} {'point' if found.points == 1 else 'points'}"
    right = f", and its accuracy {went(*found.right, percent)}" if found.right else ""
    return f"While {phase}, the {what} of {task} {went(before, after, short)} {at}{right}. {blame(found)}"


def went(before: float, after: float, said: Callable[[float], str]) -> str:
    """Say how a number changed, as far as it is told.

    >>> went(1.0, 0.71, percent), went(0.5, 0.5, short)
    ('fell from 100 % to 71 %', 'stayed at 0.5')
    """
    if said(before) == said(after):
        return f"stayed at {said(after)}"
    return f"{'fell' if after < before else 'rose'} from {said(before)} to {said(after)}"


def blame(found: Forgetting) -> str:
    """Say which examples did how much of it: together all."""
    sign = 1 if found.right else -1
    remembered = {phase: found.of_phase(phase) for phase in sorted({*found.learned_in} - {found.during})}
    parts = [f"examples of phase {found.during} moved it by {signed(sign * found.of_phase(found.during))}"]
    parts += [
        f"examples of phase {phase}, which the optimizer remembered, by {signed(sign * done)}"
        for phase, done in remembered.items()
        if done
    ]
    parts += [f"decay of the weights by {signed(sign * found.decay)}"] if found.decay else []
    parts += (
        [f"half of all harm was done by {found.halving} of the {found.acting} examples that acted"]
        if found.halving
        else []
    )
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def table(run: Run, found: Forgetting, top: int) -> str:
    """Tabulate the examples that did most harm, and all others in one line."""
    what, sign = ("margin", 1) if found.right else ("loss", -1)
    header = (f"harm to {found.names[0]} by", "phase", "target", f"{what} moved by", "of all harm")
    rows = []
    for k in found.worst[:top]:
        shown = example(run, "train", k)
        share = percent(-found.by[k] / found.harm)
        rows.append((f"#{shown.index}", str(found.learned_in[k]), shown.name, signed(sign * found.by[k]), share))
    if rest := found.worst[top:]:
        done = sum(found.by[k] for k in rest)
        rows.append((counted(len(rest), "other"), "", "", signed(sign * done), percent(-done / found.harm)))
    return aligned(header, rows, (False, True, False, True, True))
