"""`ntkexp kernel predict` and `study`: targets predicted from kernel files, as tables."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ntkexp.cli.kernel.fill import FOLDER, FillRequest, order_limit
from ntkexp.mistake import Mistake
from ntkexp.text import aligned, short

if TYPE_CHECKING:
    from ntkexp.cli.kernel.fill import Order
    from ntkexp.kernel_file.predict import Answer, Entries, Question, Score
    from ntkexp.records.kernel_file import KernelMatrix


# --- Scores and predictions as tables: every digit in a file, few on the terminal.


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
    from ntkexp.records.results import cell

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


# --- `ntkexp kernel predict`: targets are predicted from a kernel file.


@dataclass(frozen=True, kw_only=True)
class PredictRequest:
    """What the command line asks for, by the names of its options."""

    file: Path
    overrides: Sequence[str]
    ridge: str
    times: Sequence[str]
    steps: int | None
    step_size: float | None
    folds: int | None
    solver: Any
    memory_gb: float
    out: Path | None
    quiet: bool
    as_json: bool
    trust: Sequence[str]
    config_dir: Path | None


def predict(asked: PredictRequest) -> None:
    """Solve, compare, write and show."""
    from ntkexp.kernel_file.predict import Entries, predict
    from ntkexp.records.kernel_file import open_matrix
    from ntkexp.report.progress import listener

    question = question_of(asked)
    matrix = open_matrix(asked.file.expanduser())
    if asked.overrides:
        refuse_other_data(matrix, asked)
    entries = Entries(matrix)
    answers = list(predict(entries, question, listener(asked.quiet).say))
    scores = [score for answer in answers for score in answer.scores]
    folder = asked.out.expanduser() if asked.out else matrix.path.parent
    columns = [field.name for field in fields(scores[0])]
    written = [
        save(folder, f"{matrix.path.stem}.scores.csv", columns, map(astuple, scores)),
        save(folder, f"{matrix.path.stem}.predictions.csv", *outputs(entries, answers)),
    ]
    show_predictions(scores, written, asked)


def question_of(asked: PredictRequest) -> Question:
    """Read what is asked of a kernel file, in numbers."""
    from ntkexp.kernel_file.predict import Question

    if asked.times and asked.steps is not None:
        raise Mistake("--time is of gradient flow and --steps of gradient descent; give one of the two")
    times = tuple(number("--time", text, "a number ≥ 0, or inf") for text in asked.times or ("inf",))
    return Question(
        times=times,
        steps=asked.steps,
        step_size=asked.step_size,
        ridge=ridge(asked.ridge),
        folds=asked.folds,
        solver=asked.solver,
        memory_gb=asked.memory_gb,
    )


def ridge(text: str) -> float | None:
    """Read a ridge; None asks for the best one."""
    return None if text == "best" else number("--ridge", text, "a number ≥ 0, or best")


def number(option: str, text: str, allowed: str) -> float:
    """Read a number that is not negative."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not found >= 0:
        raise Mistake(f"{option}={text}: it takes {allowed}")
    return found


def refuse_other_data(matrix: KernelMatrix, asked: PredictRequest) -> None:
    """Refuse a file that is of other data than is named."""
    from ntkexp.config.compose import compose
    from ntkexp.kernel_file.tile import Subject

    experiment = compose(asked.overrides, asked.config_dir, asked.trust)
    subject = Subject(experiment, experiment.draw(), {}, 1)
    if subject.data_digest != matrix.description["data_sha256"]:
        named = " ".join(asked.overrides)
        raise Mistake(f"{asked.file} is of other data than {named}; leave that out, or compute the kernel of it")


def show_predictions(scores: Sequence[Score], written: Sequence[Path], asked: PredictRequest) -> None:
    """Show the table, and where all digits are."""
    from dataclasses import asdict

    from ntkexp.records.atomic import to_text

    if asked.as_json:
        rows = [asdict(score) for score in scores]
        sys.stdout.write(to_text({"scores": rows, "files": [str(path) for path in written]}))
    elif not asked.quiet:
        sys.stdout.write(f"{table(scores)}\n\n" + "".join(f"{path}\n" for path in written))


# --- `ntkexp kernel study`: kernels of infinite width that are computed, solved with, and shown in one table.


@dataclass(frozen=True, kw_only=True)
class StudyRequest:
    """What the command line asks for; `filling` is what it shares with computing one kernel."""

    name: str
    ridge: str
    filling: FillRequest


def study(asked: StudyRequest) -> None:
    """Compute the study's kernels one by one, and show what they score."""
    from ntkexp.config.choices import Choices, folders
    from ntkexp.kernel_file.predict import Question, study

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
    show_study([dict(zip(header, row, strict=True)) for row in rows], file, asked.filling)


def scores_of(order: Order, question: Question) -> list[Score]:
    """Score one kernel file on its test points."""
    from ntkexp.kernel_file.predict import Entries, predict

    entries = Entries(order.fill())
    answers = list(predict(entries, question, lambda text: None))
    return [score for answer in answers for score in answer.scores if score.split == "test"]


def show_study(rows: Sequence[Mapping[str, str | float | None]], file: Path, asked: FillRequest) -> None:
    """Show one line for each kernel."""
    from ntkexp.records.atomic import to_text

    if asked.as_json:
        sys.stdout.write(to_text({"study": [dict(row) for row in rows], "file": str(file)}))
    elif not asked.quiet:
        known = any(row["published"] for row in rows)
        source = next((f", {row['published_with']}" for row in rows if row["published_with"]), "")
        header = ["", "kernel", "ridge", "accuracy", "RMSE", "R²", *([f"published{source}"] if known else [])]
        lines = [
            [
                *(str(row["name"]), str(row["kernel"]).upper(), short(as_number(row["ridge"]))),
                rate(None if row["accuracy"] is None else as_number(row["accuracy"])),
                *(short(as_number(row["rmse"])), short(as_number(row["r2"]))),
                *([f"{row['published']} %" if row["published"] else ""] if known else []),
            ]
            for row in rows
        ]
        sys.stdout.write(f"{aligned(header, lines, [False, False, *[True] * (len(header) - 2)])}\n\n{file}\n")


def as_number(value: str | float | None) -> float:
    """Read a cell that holds a number."""
    assert isinstance(value, int | float)
    return float(value)
