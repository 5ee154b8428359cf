"""`ntkexp validate`: compare scores of training examples
with retraining without some examples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ntkexp.cli.options import (
    Again,
    AsJson,
    Engine,
    Quiet,
    Trust,
    Workers,
    interruptible,
    write_json,
    write_out,
)
from ntkexp.mistake import Mistake


def validate(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="The folder of a finished run, or of an attributed loop.",
        ),
    ],
    scores: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE.npy",
            help=(
                "Scores of another method, [point, out, example], positive if the example raises the "
                "output; may be repeated."
            ),
        ),
    ] = None,
    trainings: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=3,
            help="The number of retrainings for the ground truth.",
        ),
    ] = 100,
    leave_out: Annotated[
        str,
        typer.Option(
            metavar="SHARE|N",
            help=(
                "The random examples that each training leaves out: 1%, 50%, or 8. `ntkexp explain "
                "--without` leaves out chosen examples."
            ),
        ),
    ] = "1%",
    top: Annotated[
        str,
        typer.Option(
            metavar="SHARE|N",
            help="The top examples that QLD removes for each query; 0: no QLD.",
        ),
    ] = "1%",
    fresh: Annotated[
        int,
        typer.Option(
            metavar="K",
            min=0,
            help="The number of fresh seeds for each training; 0: the seed of the run.",
        ),
    ] = 0,
    queries: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="The number of points at which scores are compared.",
        ),
    ] = 50,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="SPLIT",
            help="The split of these points: train, query or test.",
        ),
    ] = None,
    lower_is_better: Annotated[
        bool,
        typer.Option(
            "--lower-is-better",
            help="The outputs are losses, so the top examples are those that lower them.",
        ),
    ] = False,
    truth: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npz",
            help="The file for the ground truth, for use by other methods.",
        ),
    ] = None,
    again: Again = None,
    workers: Workers = None,
    engine: Engine = "local",
    quiet: Quiet = False,
    as_json: AsJson = False,
    trust: Trust = None,
) -> None:
    """Compare scores of examples with retraining (LDS, QLD)."""
    from ntkexp.engine.base import choose

    shares = {
        "leave-out": share_of(leave_out, "--leave-out"),
        "top": share_of(top, "--top"),
    }
    for path in scores or []:
        if not path.is_file():
            raise Mistake(f"--scores={path}: there is no such file")
    chosen = choose(engine, workers)
    chosen.limit_threads()
    from ntkexp.report.validation import read_scores
    from ntkexp.validation import validate as validation

    with interruptible(lambda: "; the same command continues"):
        validation_result = validation(
            run.expanduser(),
            {path.stem: read_scores(path) for path in scores or []} or None,
            again=again,
            leave_out=shares["leave-out"],
            trainings=trainings,
            top=shares["top"] or None,
            fresh=fresh,
            queries=queries,
            split=split,
            lower_is_better=lower_is_better,
            engine=chosen,
            trust=trust or [],
            quiet=quiet,
        )
    truth_file = truth or run.expanduser() / "validation" / "ground_truth.npz"
    validation_result.truth.write(truth_file)
    if as_json:
        write_json(validation_result.as_json())
    else:
        write_out(f"{validation_result}\nleft out by each training: {truth_file}\n")


def share_of(text: str, option: str) -> float:
    """Parse a share of the examples (below 1), or a number of examples.

    >>> share_of("1%", "--top"), share_of("8", "--top"), share_of("0.5", "--top")
    (0.01, 8.0, 0.5)
    """
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        number = -1.0
    is_share = text.endswith("%") or number < 1
    if not 0 <= number < float("inf") or (
        number >= 1 if is_share else number != int(number)
    ):
        raise Mistake(
            f"{option}={text}: it takes a share below 100 % such as 1% or 0.01, or a number of examples such as 8"
        )
    return number
