"""`ntkexp kernel study`: kernels of infinite width that are computed, solved with, and shown in one table."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ntkexp.cli.kernel.fill import order_limit
from ntkexp.cli.kernel.order import FOLDER
from ntkexp.cli.kernel.predict import ridge
from ntkexp.cli.kernel.request import FillRequest
from ntkexp.cli.kernel.tables import rate, save
from ntkexp.text import aligned, short

if TYPE_CHECKING:
    from ntkexp.cli.kernel.order import Order
    from ntkexp.kernel_file.predict.question import Question
    from ntkexp.kernel_file.predict.score import Score


@dataclass(frozen=True, kw_only=True)
class StudyRequest:
    """What the command line asks for; `filling` is what it shares with computing one kernel."""

    name: str
    ridge: str
    filling: FillRequest


def study(asked: StudyRequest) -> None:
    """Compute the study's kernels one by one, and show what they score."""
    from ntkexp.config.choices import Choices
    from ntkexp.config.folders import folders
    from ntkexp.kernel_file.predict.question import Question
    from ntkexp.kernel_file.study import study

    found = study(asked.name, Choices(folders(asked.filling.config_dir)))
    question, place = Question(ridge=ridge(asked.ridge)), asked.filling.out or FOLDER
    engine, rows = asked.filling.choose_engine(), list[list[str | float | None]]()
    for name, overrides in found.overrides(asked.filling.overrides).items():
        for score in scores_of(
            order_limit(replace(asked.filling, overrides=overrides, out=None), engine, place), question
        ):
            beside = found.published.get(name) if score.kernel == "ntk" else None
            source = found.published_with if beside else None
            numbers = [score.ridge, score.accuracy, score.rmse, score.r2]
            rows.append([name, score.kernel, score.points, *numbers, beside, source])
    header = ["name", "kernel", "points", "ridge", "accuracy", "rmse", "r2", "published", "published_with"]
    file = save(place.expanduser(), f"{asked.name}.study.csv", header, rows)
    show([dict(zip(header, row, strict=True)) for row in rows], file, asked.filling)


def scores_of(order: Order, question: Question) -> list[Score]:
    """Score one kernel file on its test points."""
    from ntkexp.kernel_file.predict.entries import Entries
    from ntkexp.kernel_file.predict.predict import predict

    entries = Entries(order.fill())
    answers = list(predict(entries, question, lambda text: None))
    return [score for answer in answers for score in answer.scores if score.split == "test"]


def show(rows: Sequence[Mapping[str, str | float | None]], file: Path, asked: FillRequest) -> None:
    """Show one line for each kernel."""
    from ntkexp.records.json_file import to_text

    if asked.as_json:
        sys.stdout.write(to_text({"study": [dict(row) for row in rows], "file": str(file)}))
    elif not asked.quiet:
        known = any(row["published"] for row in rows)
        source = next((f", {row['published_with']}" for row in rows if row["published_with"]), "")
        header = ["", "kernel", "ridge", "accuracy", "RMSE", "R²", *([f"published{source}"] if known else [])]
        lines = [
            [
                *(str(row["name"]), str(row["kernel"]).upper(), short(number(row["ridge"]))),
                rate(None if row["accuracy"] is None else number(row["accuracy"])),
                *(short(number(row["rmse"])), short(number(row["r2"]))),
                *([f"{row['published']} %" if row["published"] else ""] if known else []),
            ]
            for row in rows
        ]
        sys.stdout.write(f"{aligned(header, lines, [False, False, *[True] * (len(header) - 2)])}\n\n{file}\n")


def number(value: str | float | None) -> float:
    """Read a cell that holds a number."""
    assert isinstance(value, int | float)
    return float(value)
