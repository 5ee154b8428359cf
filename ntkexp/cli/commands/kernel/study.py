"""`ntkexp kernel study`: kernels of infinite width that are computed, solved with, and shown in one table."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ntkexp.cli.commands.kernel.predict import read_ridge, save
from ntkexp.cli.kernel_files import FOLDER, Filling, Tiles, compose_for_tiles, default_path, tiles_at_once
from ntkexp.cli.options import CommonOptions, Engine, Overrides
from ntkexp.text import aligned, rate, short


def study(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of a file in configs/study, such as images.")],
    overrides: Overrides = None,
    ridge: Annotated[
        str,
        typer.Option(
            "--ridge",
            metavar="R|best",
            help="What is added to each kernel's diagonal; best: of a grid, by the examples left out.",
        ),
    ] = "best",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="The folder for the kernels and the table.")
    ] = None,
    workers: Tiles = None,
    engine: Engine = "local",
    *,
    common: CommonOptions,
) -> None:
    """Compare several kernels of infinite width in one table of accuracies."""
    from ntkexp.config.choices import Choices, folders
    from ntkexp.engine.base import choose
    from ntkexp.kernel_file.kernel import InfiniteKernel
    from ntkexp.kernel_file.predict import Entries, Question, predict
    from ntkexp.kernel_file.predict import study as read_study

    definition = read_study(name, Choices(folders(common.config_dir)))
    question, place = Question(ridge=read_ridge(ridge)), (out or FOLDER).expanduser()
    chosen, rows = choose(engine, workers), list[list[str | float | None]]()
    for each, words in definition.overrides(overrides or []).items():
        experiment = compose_for_tiles(words, common)
        kernel = InfiniteKernel(experiment, experiment.draw(), tiles_at_once(chosen))
        filling = Filling(kernel, default_path(kernel, place), chosen, workers, force=False)
        entries = Entries(filling.carry_out(common.trusted, quiet=common.quiet))
        answers = list(predict(entries, question, lambda text: None))
        for score in (score for answer in answers for score in answer.scores if score.split == "test"):
            beside = definition.published.get(each) if score.kernel == "ntk" else None
            source = definition.published_with if beside else None
            numbers = [score.ridge, score.accuracy, score.rmse, score.r2]
            rows.append([each, score.kernel, score.points, *numbers, beside, source])
    header = ["name", "kernel", "points", "ridge", "accuracy", "rmse", "r2", "published", "published_with"]
    file = save(place, f"{name}.study.csv", header, rows)
    show_study([dict(zip(header, row, strict=True)) for row in rows], file, quiet=common.quiet, as_json=common.as_json)


def show_study(rows: Sequence[Mapping[str, str | float | None]], file: Path, *, quiet: bool, as_json: bool) -> None:
    from ntkexp.records.atomic import to_text

    if as_json:
        sys.stdout.write(to_text({"study": [dict(row) for row in rows], "file": str(file)}))
    elif not quiet:
        has_published = any(row["published"] for row in rows)
        source = next((f", {row['published_with']}" for row in rows if row["published_with"]), "")
        header = ["", "kernel", "ridge", "accuracy", "RMSE", "R²", *([f"published{source}"] if has_published else [])]
        lines = []
        for row in rows:
            ridge, rmse, r2 = (float(row[key] or 0.0) for key in ("ridge", "rmse", "r2"))
            accuracy = None if row["accuracy"] is None else float(row["accuracy"])
            cells = [str(row["name"]), str(row["kernel"]).upper(), short(ridge), rate(accuracy), short(rmse), short(r2)]
            lines.append(cells + ([f"{row['published']} %" if row["published"] else ""] if has_published else []))
        sys.stdout.write(f"{aligned(header, lines, [False, False, *[True] * (len(header) - 2)])}\n\n{file}\n")
