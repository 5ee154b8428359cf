"""`ntkexp kernel tangent`: the tangent kernel of networks as they are drawn, or of a run, into a file."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ntkexp.cli.kernel_files import FillOptions, KernelFile, compose_for_tiles, fill_file, tiles_at_once
from ntkexp.cli.options import CommonOptions, Overrides
from ntkexp.mistake import Mistake

if TYPE_CHECKING:
    from ntkexp.kernel.read.plan import Outputs


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
    *,
    options: FillOptions,
    common: CommonOptions,
) -> None:
    """Compute the tangent kernel of a network as it is drawn, or of a finished run."""
    if run is not None:
        surplus = " ".join(overrides or []) or "--seeds" * (seeds is not None)
        if surplus:
            raise Mistake(f"--run={run} says which network and which data; leave out {surplus}")
        if not (run.expanduser() / "config.json").is_file():
            raise Mistake(f"--run={run} is no run folder: it has no config.json")
    from ntkexp.engine.base import choose

    engine = choose(options.engine, options.workers)
    if run is None:
        experiment = compose_for_tiles(overrides, common)
        from ntkexp.sweep.definition import values, whole_numbers

        seed_list = (experiment.seed,) if seeds is None else tuple(whole_numbers(values("--seeds", seeds)))
        weights = ""
    else:  # the weights of a run that is finished, as they were written
        from ntkexp.config.build import admit
        from ntkexp.records.folder import RunFolder
        from ntkexp.run.environment import fix_circumstances
        from ntkexp.run.execute import rebuilt

        written = RunFolder(run.expanduser())
        if written.state in {"running", "interrupted", "dead"}:
            raise Mistake(f"--run={run} is not finished; `ntkexp resume` goes on with it")
        written.check("weights.pt")
        experiment = rebuilt(written, admit(common.trusted))
        fix_circumstances(experiment, experiment.threads or 1)
        seed_list, weights = (), str((written.path / "weights.pt").absolute())
    from ntkexp.kernel_file.kernel import EmpiricalKernel

    wanted, data = read_outputs(outputs), experiment.draw()
    kernel = EmpiricalKernel(experiment, data, tiles_at_once(engine), seed_list, wanted, weights, when.value)
    fill_file(kernel, out, engine, options, common)


def read_outputs(outputs: str) -> Outputs:
    """Which outputs are meant: all, their trace, or some of them by number."""
    match outputs:
        case "all":
            return "all"
        case "trace":
            return "trace"
    try:
        return [int(number) for number in outputs.split(",")]
    except ValueError:
        raise Mistake(f"--outputs={outputs}: it takes all, trace, or numbers of outputs, such as 0,3") from None
