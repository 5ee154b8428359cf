"""`ntkexp kernel predict` and `study`: predict targets from a kernel file,
or compare kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from ntkexp.cli.kernel_fill import (
    KERNELS_FOLDER,
    Filling,
    Tiles,
    compose_for_tiles,
    default_path,
    tiles_at_once,
)
from ntkexp.cli.options import CommonOptions, Engine, Overrides, write_json
from ntkexp.mistake import Mistake
from ntkexp.report.tables import Column, Table, format_text, text_column
from ntkexp.text import rate

if TYPE_CHECKING:
    from ntkexp.kernel_file.predict import Entries, KernelPredictions, Score, Study
    from ntkexp.records.kernel_file import KernelMatrix


class Solver(StrEnum):
    """The method for solving the linear equations."""

    eigen = "eigen"
    cholesky = "cholesky"
    cg = "cg"


def predict(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A kernel file.")],
    overrides: Overrides = None,
    ridge: Annotated[
        str,
        typer.Option(
            metavar="R|best",
            help=(
                "The number added to the kernel's diagonal; best: choose it from a grid by "
                "cross-validation."
            ),
        ),
    ] = "0",
    time: Annotated[
        list[str] | None,
        typer.Option(
            metavar="T",
            help="The training time of gradient flow, or inf; may be repeated.",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Train by N steps of gradient descent instead.",
        ),
    ] = None,
    step_size: Annotated[
        float | None,
        typer.Option(metavar="ETA", help="The size of these steps."),
    ] = None,
    folds: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=0,
            help="Also cross-validate the training examples with K folds; 0: leave one out.",
        ),
    ] = None,
    solver: Annotated[
        Solver | None,
        typer.Option(
            metavar="|".join(Solver),
            help="The method to solve the equations; by default, the simplest one that fits.",
        ),
    ] = None,
    memory_gb: Annotated[
        float,
        typer.Option(metavar="GB", help="The memory limit for solving."),
    ] = 4.0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The folder for the tables; by default, the folder of the kernel file.",
        ),
    ] = None,
    *,
    common: CommonOptions,
) -> None:
    """Predict targets from a kernel file.

    Print accuracy, error and calibration. KEY=VALUE names the data of the file.
    """
    from ntkexp.kernel_file.predict import (
        Entries,
        PredictionSettings,
        predict as predict_from,
    )
    from ntkexp.records.kernel_file import open_matrix
    from ntkexp.report.progress import progress_listener

    if time and steps is not None:
        raise Mistake(
            "--time is for gradient flow and --steps for gradient descent; give one of the two"
        )
    settings = PredictionSettings(
        times=tuple(
            number("--time", text, "a number ≥ 0, or inf") for text in time or ("inf",)
        ),
        steps=steps,
        step_size=step_size,
        ridge=read_ridge(ridge),
        folds=folds,
        solver=None if solver is None else solver.value,
        memory_gb=memory_gb,
    )
    matrix = open_matrix(file.expanduser())
    if overrides:
        refuse_other_data(matrix, overrides, common, file)
    entries = Entries(matrix)
    predictions = list(
        predict_from(entries, settings, progress_listener(common.quiet).say)
    )
    # warn even if quiet: the predictions are written, but not usable
    for prediction in predictions:
        if prediction.solved.warning is not None:
            sys.stderr.write(
                f"ntkexp: {prediction.kernel}: {prediction.solved.warning}\n"
            )
    scores = [score for prediction in predictions for score in prediction.scores]
    folder = out.expanduser() if out else matrix.path.parent
    name = matrix.path.stem
    columns = [field.name for field in fields(scores[0])]
    written = [
        save(folder, f"{name}.scores.csv", columns, map(astuple, scores)),
        save(folder, f"{name}.predictions.csv", *outputs(entries, predictions)),
    ]
    if common.as_json:
        rows = [asdict(score) for score in scores]
        write_json({"scores": rows, "files": [str(path) for path in written]})
    elif not common.quiet:
        paths = "".join(f"{path}\n" for path in written)
        sys.stdout.write(f"{table(scores)}\n\n{paths}")


def refuse_other_data(
    matrix: KernelMatrix, overrides: Sequence[str], common: CommonOptions, file: Path
) -> None:
    """Raise if a kernel file was computed for other data than those of the overrides."""
    from ntkexp.kernel_file.kernel import data_digest

    data = common.compose(overrides).draw()
    if data_digest(data) != matrix.description["data_sha256"]:
        raise Mistake(
            f"{file} was computed for other data than {' '.join(overrides)}; leave that out, "
            "or compute its kernel"
        )


def read_ridge(text: str) -> float | None:
    """Parse `--ridge`. Return None for `best`,
    which selects the ridge by cross-validation."""
    return None if text == "best" else number("--ridge", text, "a number ≥ 0, or best")


def number(option: str, text: str, allowed: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise Mistake(f"{option}={text}: it takes {allowed}")
    return value


# --- Scores and predictions as tables: full precision in files,
# rounded on the terminal.


def outputs(
    entries: Entries, predictions: Sequence[KernelPredictions]
) -> tuple[list[str], Iterable[Sequence[object]]]:
    """Return the header and rows of the predictions: a row for each kernel, training
    time, split and point."""
    columns = entries.targets.shape[1]
    names = [f"{kind}_{k}" for kind in ("target", "output") for k in range(columns)]
    header = ["kernel", "when", "ridge", "split", "index", "label", *names, "deviation"]
    index = entries.matrix.array("index")
    rows = []
    for prediction in predictions:
        for split, points in entries.matrix.splits.items():
            predicted = prediction.predicted[split]
            indices = range(points.start, points.stop)
            deviation = [None] * len(indices)
            if predicted.deviation is not None:
                deviation = predicted.deviation.tolist()
            head = (
                prediction.kernel,
                prediction.solved.when,
                prediction.solved.ridge,
                split,
            )
            for k, values, spread in zip(
                indices, predicted.mean.tolist(), deviation, strict=True
            ):
                point = (int(index[k]), int(entries.labels[k]))
                targets = entries.targets[k].tolist()
                rows.append((*head, *point, *targets, *values, spread))
    return header, rows


def save(
    folder: Path, name: str, header: Sequence[str], rows: Iterable[Sequence[Any]]
) -> Path:
    """Write a table as CSV, in full precision. Return its path."""
    from ntkexp.records.atomic import write_atomically
    from ntkexp.records.results import csv_text

    try:
        write_atomically(folder / name, csv_text(header, rows))
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise Mistake(
            f"--out={folder}: {error.strerror}; it takes a folder that can be written to"
        ) from None
    return folder / name


def table(scores: Sequence[Score]) -> str:
    """Format the scores as a table for the terminal."""
    columns = (
        Column("kernel", number=False),
        Column("trained", number=False),
        Column("ridge"),
        Column("split", number=False),
        Column("points"),
        Column("accuracy", spell=rate),
        *map(Column, ("RMSE", "R²", "log loss", "ECE")),
        Column("solved by", number=False),
    )
    return format_text(Table(columns, tuple(map(astuple, scores))))


STUDY_COLUMNS = (
    *("name", "kernel", "points", "ridge", "accuracy", "rmse", "r2"),
    *("published", "published_with"),
)
StudyRow: TypeAlias = Mapping[str, str | float | None]
"""The scores of one kernel on the test split, by column."""


def study(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="The name of a file in configs/study, such as images."
        ),
    ],
    overrides: Overrides = None,
    ridge: Annotated[
        str,
        typer.Option(
            metavar="R|best",
            help=(
                "The number added to each kernel's diagonal; best: choose it from a grid by "
                "cross-validation."
            ),
        ),
    ] = "best",
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The folder for the kernels and the table."),
    ] = None,
    workers: Tiles = None,
    engine: Engine = "local",
    *,
    common: CommonOptions,
) -> None:
    """Compare kernels of infinite width by their accuracy."""
    from ntkexp.config.choices import Choices, config_folders
    from ntkexp.engine.base import choose
    from ntkexp.kernel_file.kernel import InfiniteKernel
    from ntkexp.kernel_file.predict import (
        Entries,
        PredictionSettings,
        predict,
        read_study,
    )

    definition = read_study(name, Choices(config_folders(common.config_dir)))
    settings = PredictionSettings(ridge=read_ridge(ridge))
    folder = (out or KERNELS_FOLDER).expanduser()
    chosen = choose(engine, workers)
    rows = list[StudyRow]()
    for kernel_name, kernel_overrides in definition.overrides(overrides or []).items():
        experiment = compose_for_tiles(kernel_overrides, common)
        kernel = InfiniteKernel(experiment, experiment.draw(), tiles_at_once(chosen))
        filling = Filling(
            kernel, default_path(kernel, folder), chosen, workers, force=False
        )
        entries = Entries(filling.fill(common.trusted, quiet=common.quiet))
        for prediction in predict(entries, settings, lambda text: None):
            rows += study_rows(definition, kernel_name, prediction.scores)
    values = [list(row.values()) for row in rows]
    file = save(folder, f"{name}.study.csv", STUDY_COLUMNS, values)
    show_study(rows, file, quiet=common.quiet, as_json=common.as_json)


def study_rows(
    definition: Study, name: str, scores: Sequence[Score]
) -> Iterator[StudyRow]:
    """Yield a row for each score on the test split."""
    for score in scores:
        if score.split != "test":
            continue
        published = definition.published.get(name) if score.kernel == "ntk" else None
        source = definition.published_with if published else None
        numbers = (score.points, score.ridge, score.accuracy, score.rmse, score.r2)
        row = (name, score.kernel, *numbers, published, source)
        yield dict(zip(STUDY_COLUMNS, row, strict=True))


def show_study(
    rows: Sequence[StudyRow], file: Path, *, quiet: bool, as_json: bool
) -> None:
    if as_json:
        write_json({"study": [dict(row) for row in rows], "file": str(file)})
    elif not quiet:
        source = next(
            (f", {row['published_with']}" for row in rows if row["published_with"]), ""
        )
        columns = (
            text_column("name", heading=""),
            text_column("kernel"),
            Column("ridge"),
            Column("accuracy", spell=rate),
            *map(Column, ("RMSE", "R²")),
            Column(f"published{source}", spell="{} %".format),
        )
        lines = []
        for row in rows:
            kernel = str(row["kernel"]).upper()
            numbers = [row[key] for key in ("ridge", "accuracy", "rmse", "r2")]
            lines.append((row["name"], kernel, *numbers, row["published"] or ""))
        table = Table(columns, tuple(lines))
        if not any(row["published"] for row in rows):
            table = table.select(*(column.name for column in columns[:-1]))
        sys.stdout.write(f"{format_text(table)}\n\n{file}\n")
