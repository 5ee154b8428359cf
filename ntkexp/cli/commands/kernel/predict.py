"""The arguments of `ntkexp kernel predict`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ntkexp.cli.arguments import AsJson, ConfigDir, Overrides, Quiet, Trust


class Solver(StrEnum):
    """How linear equations are solved."""

    eigen = "eigen"
    cholesky = "cholesky"
    cg = "cg"


def predict(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A kernel file.")],
    overrides: Overrides = None,
    ridge: Annotated[
        str,
        typer.Option(
            "--ridge",
            metavar="R|best",
            help="What is added to the kernel's diagonal; best: of a grid, by the examples left out.",
        ),
    ] = "0",
    time: Annotated[
        list[str] | None,
        typer.Option("--time", metavar="T", help="How long gradient flow trains, or inf; may be repeated."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", metavar="N", min=0, help="Train by so many steps of gradient descent instead."),
    ] = None,
    step_size: Annotated[
        float | None, typer.Option("--step-size", metavar="ETA", help="The size of these steps.")
    ] = None,
    folds: Annotated[
        int | None,
        typer.Option(
            "--folds", metavar="K", min=0, help="Score training examples that are left out, in K parts; 0: one by one."
        ),
    ] = None,
    solver: Annotated[
        Solver | None,
        typer.Option(
            "--solver",
            metavar="|".join(Solver),
            help="How equations are solved; the plainest way that fits if not given.",
        ),
    ] = None,
    memory_gb: Annotated[
        float, typer.Option("--memory-gb", metavar="GB", help="The memory that solving may take.")
    ] = 4.0,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="The folder for the tables; beside the kernel file if not given."),
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    trust: Trust = None,
    config_dir: ConfigDir = None,
) -> None:
    """Predict targets from a kernel file: accuracy, error and calibration. KEY=VALUE: its data."""
    from ntkexp.cli.kernel.predict import PredictRequest, predict

    predict(
        PredictRequest(
            file=file,
            overrides=overrides or [],
            ridge=ridge,
            times=time or [],
            steps=steps,
            step_size=step_size,
            folds=folds,
            solver=solver and solver.value,
            memory_gb=memory_gb,
            out=out,
            quiet=quiet,
            as_json=as_json,
            trust=trust or [],
            config_dir=config_dir,
        )
    )
