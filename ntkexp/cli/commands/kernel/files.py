"""The arguments of `ntkexp kernel …`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ntkexp.cli.arguments import (
    AsJson,
    ConfigDir,
    Engine,
    FillDryRun,
    KernelFile,
    Overrides,
    Quiet,
    Recompute,
    Tiles,
    Trust,
)

# --- The arguments of `ntkexp kernel limit`.


def limit(
    overrides: Overrides = None,
    out: KernelFile = None,
    workers: Tiles = None,
    engine: Engine = "local",
    dry_run: FillDryRun = False,
    force: Recompute = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    trust: Trust = None,
    config_dir: ConfigDir = None,
) -> None:
    """Compute the kernels of an architecture at infinite width, NNGP and NTK."""
    from ntkexp.cli.kernel.fill import FillRequest, limit

    limit(
        FillRequest(
            overrides=overrides or [],
            out=out,
            workers=workers,
            engine=engine,
            dry_run=dry_run,
            force=force,
            quiet=quiet,
            as_json=as_json,
            trust=trust or [],
            config_dir=config_dir,
        )
    )


# --- The arguments of `ntkexp kernel tangent`.


class When(StrEnum):
    """Which weights of a run are meant."""

    start = "start"
    end = "end"


def tangent(
    overrides: Overrides = None,
    out: KernelFile = None,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", metavar="SEEDS", help="The seeds of the networks to average over, such as 0..9."),
    ] = None,
    outputs: Annotated[
        str,
        typer.Option(
            "--outputs",
            metavar="all|trace|0,3",
            help="The outputs between which the kernel is taken: all, some by number, or their trace.",
        ),
    ] = "all",
    run: Annotated[
        Path | None, typer.Option("--run", metavar="RUN", help="Take the network of this run instead.")
    ] = None,
    when: Annotated[
        When,
        typer.Option(
            "--at",
            metavar="|".join(When),
            help="Take the weights of the run before training (start) or after it (end).",
        ),
    ] = When.end,
    workers: Tiles = None,
    engine: Engine = "local",
    dry_run: FillDryRun = False,
    force: Recompute = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    trust: Trust = None,
    config_dir: ConfigDir = None,
) -> None:
    """Compute the tangent kernel of a network as it is drawn, or of a finished run."""
    from ntkexp.cli.kernel.fill import FillRequest, tangent, tangent_of_run

    asked = FillRequest(
        overrides=overrides or [],
        out=out,
        workers=workers,
        engine=engine,
        dry_run=dry_run,
        force=force,
        quiet=quiet,
        as_json=as_json,
        trust=trust or [],
        config_dir=config_dir,
    )
    if run is None:
        tangent(asked, seeds, outputs)
    else:
        tangent_of_run(asked, seeds, outputs, run, when.value)


# --- The arguments of `ntkexp kernel predict`.


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


# --- The arguments of `ntkexp kernel study`.


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
    quiet: Quiet = False,
    as_json: AsJson = False,
    trust: Trust = None,
    config_dir: ConfigDir = None,
) -> None:
    """Compare several kernels of infinite width in one table of accuracies."""
    from ntkexp.cli.kernel.fill import FillRequest
    from ntkexp.cli.kernel.predict import StudyRequest, study

    filling = FillRequest(
        overrides=overrides or [],
        out=out,
        workers=workers,
        engine=engine,
        quiet=quiet,
        as_json=as_json,
        trust=trust or [],
        config_dir=config_dir,
    )
    study(StudyRequest(name=name, ridge=ridge, filling=filling))


# --- The arguments of `ntkexp kernel ensemble`.


def ensemble(
    overrides: Overrides = None,
    networks: Annotated[
        int, typer.Option("--networks", metavar="N", min=2, help="How many networks of each kind.")
    ] = 100,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder for the picture.")] = Path(
        "outputs/ensembles"
    ),
    quiet: Quiet = False,
    as_json: AsJson = False,
    trust: Trust = None,
    config_dir: ConfigDir = None,
) -> None:
    """Train many networks on a one-dimensional problem, and show them beside the processes of their kernels."""
    from ntkexp.cli.kernel.ensemble import EnsembleRequest, ensemble

    ensemble(
        EnsembleRequest(
            overrides=overrides or [],
            networks=networks,
            out=out,
            quiet=quiet,
            as_json=as_json,
            trust=trust or [],
            config_dir=config_dir,
        )
    )
