"""Scores and predictions as tables: every digit in a file, few on the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ntkexp.mistake import Mistake

if TYPE_CHECKING:
    from ntkexp.kernel_file.predict.entries import Entries
    from ntkexp.kernel_file.predict.predict import Answer
    from ntkexp.kernel_file.predict.score import Score


def outputs(entries: Entries, answers: Sequence[Answer]) -> tuple[list[str], Iterable[Sequence[object]]]:
    """Tabulate predictions: a row for each kernel, way to train and point."""
    columns = entries.targets.shape[1]
    names = [f"{what}_{k}" for what in ("target", "output") for k in range(columns)]
    header = ["kernel", "when", "ridge", "split", "index", "label", *names, "deviation"]
    index = entries.matrix.array("index")
    rows = []
    for answer in answers:
        for split, points in entries.matrix.splits.items():
            found, places = answer.predicted[split], range(points.start, points.stop)
            deviation = [None] * len(places) if found.deviation is None else found.deviation.tolist()
            head = (answer.kernel, answer.solved.when, answer.solved.ridge, split)
            for k, (place, values, spread) in enumerate(zip(places, found.mean.tolist(), deviation, strict=True)):
                told = (int(index[place]), int(entries.labels[place]))
                rows.append((*head, *told, *entries.targets[points.start + k].tolist(), *values, spread))
    return header, rows


def save(folder: Path, name: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    """Write a table as a file, with every digit."""
    from ntkexp.records.atomic import write_atomically
    from ntkexp.records.metrics import cell

    text = io.StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    table.writerow([cell(name) for name in header])
    table.writerows([cell(value) for value in row] for row in rows)
    try:
        write_atomically(folder / name, text.getvalue())
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise Mistake(f"--out={folder}: {error.strerror}; it takes a folder that can be written to") from None
    return folder / name


def table(scores: Sequence[Score]) -> str:
    """Lay scores out as a reader wants them."""
    from ntkexp.text import aligned, short

    header = ["kernel", "trained", "ridge", "split", "points", "accuracy", "RMSE", "R²", "log loss", "ECE", "solved by"]
    rows = [
        [
            *(score.kernel, score.when, short(score.ridge), score.split, str(score.points)),
            rate(score.accuracy),
            *map(short, (score.rmse, score.r2, score.log_loss, score.calibration_error)),
            score.solver,
        ]
        for score in scores
    ]
    return aligned(header, rows, [False, False, True, False, *[True] * 6, False])


def rate(share: float | None) -> str:
    """Spell an accuracy as papers print it.

    >>> rate(0.98765), rate(None)
    ('98.8 %', '–')
    """
    return "–" if share is None else f"{100 * share:.1f} %"
