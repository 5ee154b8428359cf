"""`ntkexp kernel predict`: targets are predicted from a kernel file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ntkexp.cli.kernel.tables import outputs, save, table
from ntkexp.mistake import Mistake

if TYPE_CHECKING:
    from ntkexp.kernel_file.predict.question import Question
    from ntkexp.kernel_file.predict.score import Score
    from ntkexp.records.kernel_file.store import KernelMatrix


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
    from ntkexp.kernel_file.predict.entries import Entries
    from ntkexp.kernel_file.predict.predict import predict
    from ntkexp.records.kernel_file.store import open_matrix
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
    show(scores, written, asked)


def question_of(asked: PredictRequest) -> Question:
    """Read what is asked of a kernel file, in numbers."""
    from ntkexp.kernel_file.predict.question import Question

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
    from ntkexp.kernel_file.fill.subject import Subject

    experiment = compose(asked.overrides, asked.config_dir, asked.trust)
    subject = Subject(experiment, experiment.draw(), {}, 1)
    if subject.data_digest != matrix.description["data_sha256"]:
        named = " ".join(asked.overrides)
        raise Mistake(f"{asked.file} is of other data than {named}; leave that out, or compute the kernel of it")


def show(scores: Sequence[Score], written: Sequence[Path], asked: PredictRequest) -> None:
    """Show the table, and where all digits are."""
    from dataclasses import asdict

    from ntkexp.records.json_file import to_text

    if asked.as_json:
        rows = [asdict(score) for score in scores]
        sys.stdout.write(to_text({"scores": rows, "files": [str(path) for path in written]}))
    elif not asked.quiet:
        sys.stdout.write(f"{table(scores)}\n\n" + "".join(f"{path}\n" for path in written))
